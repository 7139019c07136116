"""What a run of a script that is described, traced or measured leaves in the user's folders: nothing is lost there."""

import os
import subprocess
import sys
import textwrap

import pytest

from autofit.system.files import helper_environment, put_back
from autofit.system.fork_server_process import LEDGER

SCRIPT = """
    import os, shutil, sys
    from pathlib import Path

    log = open("runs/log.csv", "w")
    log.write("step,loss")
    open("runs/steps.txt", "a").write("new")
    assert Path("runs/steps.txt").read_text() == "oldnew"
    Path("runs/done.txt").unlink()
    Path("runs/best.tmp").write_text("new")
    os.replace("runs/best.tmp", "runs/best.txt")
    os.rename("runs/log.1", "runs/log.2")
    shutil.rmtree("final")
    os.makedirs("final")
    Path("final/weights").write_text("random")
    os.makedirs("outputs/today/.hydra")
    Path("outputs/today/.hydra/config.yaml").write_text("new")
    Path("features.npy").write_text("new")
    os.symlink("outputs/today", "latest")
    memory = open("big.dat", "r+b")
    Path(os.environ["HF_HOME"], "table").write_text("kept")
    Path(".cache").mkdir()
    Path(".cache/table").write_text("kept")
    Path("rows.lock").write_text("kept")
    Path(__file__).with_name("other").joinpath("log").write_text("new")
    if "dies" in sys.argv:
        os.kill(os.getpid(), 9)
"""
RUN = "import sys; from autofit.training.scripts.leave import run_until_left as run; run(sys.argv[1], sys.argv[2:-1], "
OLD = ("runs/log.csv", "runs/steps.txt", "runs/done.txt", "runs/best.txt", "runs/log.1", "final/weights", "big.dat")


def files(folder):
    return {str(one.relative_to(folder)): one.read_text() for one in folder.rglob("*") if one.is_file()}


def ran(tmp_path, *arguments, stays=False):
    """The files beside a script, before it was run, after it, and when that was undone."""
    user, ledger = tmp_path / "user", tmp_path / "user/answer/.ask-1/ledger"
    ledger.parent.mkdir(parents=True)
    for name in (*OLD, "other/log", "cache/old"):
        (user / name).parent.mkdir(parents=True, exist_ok=True)
        (user / name).write_text("old")
        os.utime(user / name, (1e9, 1e9))
    (user / "train.py").write_text(textwrap.dedent(SCRIPT))
    before = files(user)
    environment = {**os.environ, LEDGER: str(ledger), "HF_HOME": str(user / "cache")}
    command = (sys.executable, "-c", f"{RUN}new_files_stay={stays})", str(user / "train.py"), *arguments, "end")
    done = subprocess.run(
        command, cwd=user, env=helper_environment(environment), capture_output=True, text=True, check=False
    )
    assert done.returncode == -9 if arguments else "ended without training" in done.stderr, done.stderr
    meanwhile = files(user)
    put_back(ledger)
    assert not ledger.exists()
    return user, before, meanwhile


@pytest.mark.parametrize("arguments", [(), ("dies",)])
def test_what_a_trial_writes_over_is_put_back_and_what_it_makes_is_deleted(tmp_path, arguments):
    user, before, meanwhile = ran(tmp_path, *arguments)
    assert meanwhile["final/weights"] == "random"
    assert meanwhile["runs/best.txt"] == "new"
    after = files(user)
    assert [after.pop(name) for name in ("cache/table", ".cache/table", "rows.lock")] == ["kept"] * 3
    assert after == before
    assert not (user / "outputs").exists()
    assert not os.path.lexists(user / "latest")
    assert (user / "runs/log.csv").stat().st_mtime == 1e9


def test_what_a_description_makes_stays_for_the_trials(tmp_path):
    user, before, _ = ran(tmp_path, stays=True)
    after = files(user)
    assert before.items() <= after.items()
    assert after["features.npy"] == "new"
    assert (user / "outputs/today/.hydra/config.yaml").exists()


def test_a_log_that_another_program_holds_open_keeps_what_that_writes(tmp_path):
    (tmp_path / "user/runs").mkdir(parents=True)
    log = tmp_path / "user/runs/log.csv"
    log.write_text("old")
    holder = subprocess.Popen(
        [sys.executable, "-c", f"log = open({str(log)!r}, 'r+'); print(flush=True); input(); log.write('NEW')"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline()
    user, *_ = ran(tmp_path)
    holder.communicate(b"\n", timeout=60)
    assert (user / "runs/log.csv").read_text() == "NEW"


def test_a_torn_ledger_and_a_folder_that_holds_more_by_now_are_no_trouble(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made/more").write_text("the user's")
    (tmp_path / "ledger").write_text(f'["{tmp_path}/made"]\n["{tmp_path}/gone"]\n["{tmp_path}/ma')
    put_back(tmp_path / "ledger")
    put_back(tmp_path / "none")
    assert (tmp_path / "made/more").exists()
