"""What a run of a script that is described, traced or measured leaves in the user's folders: nothing is lost there."""

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from autofit.system.files import ASIDE, LEDGER, helper_environment, note, put_back

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


def begun(user, ledger, script, *, stays=False):
    """A run of a script that has begun; each line that it is sent lets it go on."""
    ledger.parent.mkdir(parents=True, exist_ok=True)
    path = user / f"{ledger.parent.name}.py"
    path.write_text(textwrap.dedent(script))
    os.utime(path, (1e9, 1e9))
    return subprocess.Popen(
        (sys.executable, "-c", f"{RUN}new_files_stay={stays})", str(path), "end"),
        cwd=user,
        env=helper_environment({**os.environ, LEDGER: str(ledger)}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, ledger, *, said=True):
    _, words = process.communicate("\n\n", timeout=60)
    assert "ended without training" in words or not said, words
    put_back(ledger)


def old_files(user, **contents):
    for name, text in contents.items():
        path = user / name.replace("_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (1e9, 1e9))


def after(tmp_path, script, *, stays=False, **contents):
    """The files that are there after a run of a script that was undone, but for the script itself."""
    user, ledger = tmp_path / "user", tmp_path / "jobs/trials/one/ledger"
    old_files(user, **contents)
    ended(begun(user, ledger, script, stays=stays), ledger)
    left = files(user)
    del left["one.py"]
    return left


BY_TURNS = """
    import os, shutil, sys
    from pathlib import Path

    shutil.rmtree("runs")
    Path("runs").mkdir()
    Path("runs/log.csv").write_text("new")
    Path("notes").unlink(missing_ok=True)
    Path("notes").write_text("new")
    os.replace("notes", "best")
    print("written", flush=True)
    sys.stdin.readline()
    Path("runs/log.csv").write_text("newer")
    Path("best").write_text("newer")
"""


@pytest.mark.parametrize("first", [0, 1])
def test_two_processes_beside_each_other_lose_nothing_of_the_user(tmp_path, first):
    user = tmp_path / "user"
    old_files(user, runs_log="old", runs_log2="old", notes="old", best="old")
    (user / "runs/log").rename(user / "runs/log.csv")
    before = files(user)
    ledgers = [tmp_path / f"jobs/trials/{name}/ledger" for name in ("one", "two")]
    processes = []
    for ledger in ledgers:
        processes.append(begun(user, ledger, BY_TURNS))
        assert processes[-1].stdout.readline()
    for number in (first, 1 - first):
        ended(processes[number], ledgers[number], said=False)
    assert before.items() <= files(user).items()
    assert "old" in (user / "runs/log.csv").read_text()


RACE = """
    import os, sys

    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(300):
        open(f"log{number}", "w").write("new")
"""


@pytest.mark.slow
def test_two_ranks_that_open_the_same_files_at_the_same_time_lose_none(tmp_path):
    user, ledger = tmp_path / "user", tmp_path / "jobs/trials/one/ledger"
    old_files(user, **{f"log{number}": "old" for number in range(300)})
    before = files(user)
    ranks = [begun(user, ledger, RACE) for _ in range(4)]
    for rank in ranks:
        assert rank.stdout.readline()
    for rank in ranks:
        with contextlib.suppress(BrokenPipeError):  # a script reads nothing, and may have ended
            rank.stdin.write("\n")
            rank.stdin.flush()
    for rank in ranks:
        rank.communicate(timeout=60)
    put_back(ledger)
    left = files(user)
    del left["one.py"]
    assert left == before


def test_a_listing_shows_nothing_that_was_moved_aside(tmp_path):
    script = """
        import os
        from pathlib import Path
        for number in range(2):
            open(f"data/{number}", "w").write("new")
        assert sorted(os.listdir("data")) == ["0", "1"], os.listdir("data")
        assert len(list(Path("data").rglob("*"))) == 2
    """
    assert after(tmp_path, script, data_0="old", data_1="old") == {"data/0": "old", "data/1": "old"}
    assert not (tmp_path / "user/.before-autofit").exists()


@pytest.mark.parametrize("stays", [False, True])
def test_a_folder_that_is_given_another_name_gets_its_own_back(tmp_path, stays):
    script = """
        import os
        from pathlib import Path
        os.rename("runs", "runs.1")
        Path("tmp/deep").mkdir(parents=True)
        Path("tmp/deep/x").write_text("new")
        os.rename("tmp", "done")
        open("runs.1/log", "a").write("new")
    """
    left = after(tmp_path, script, stays=stays, runs_log="old")
    assert left.pop("done/deep/x", "gone") == ("new" if stays else "gone")
    assert left == {"runs/log": "old"}
    assert stays or sorted(one.name for one in (tmp_path / "user").iterdir()) == ["one.py", "runs"]


def test_a_script_finds_what_it_would_find_by_itself(tmp_path):
    script = """
        import os, shutil
        from pathlib import Path
        shutil.rmtree("file", ignore_errors=True)
        assert Path("file").read_text() == "old"
        try:
            os.remove("data")
        except OSError:
            pass
        assert Path("data/x").read_text() == "old"
        Path("made").mkdir()
        try:
            os.rename("made", "data")
        except OSError:
            assert Path("data/x").exists()
        else:
            raise AssertionError
        open("secret", "w").write("new")
        assert os.stat("secret").st_mode & 0o777 == 0o600
        Path("touched").touch()
        open("touched", "w").write("new")
        open("later", "w").write("new")
        os.truncate("file", 1)
        os.link("linked", "second")
        open("second", "a").write("new")
        os.environ.clear()
        assert open("fresh", "w").write("new")
    """
    user = tmp_path / "user"
    old_files(user, secret="old", later="old")
    (user / "secret").chmod(0o600)
    os.utime(user / "later", (4e9, 4e9))
    left = after(tmp_path, script, file="old", data_x="old", touched="old", linked="old")
    assert left.pop("fresh") == "new"
    del left["later"]  # old_files of it came before
    assert set(left.values()) == {"old"}
    assert set(left) == {"file", "data/x", "touched", "linked", "secret"}
    assert (user / "later").read_text() == "old"
    assert (user / "secret").stat().st_mode & 0o777 == 0o600


def test_what_a_script_saves_once_it_is_left_does_not_stay(tmp_path):
    """``finally: save()``: nothing was trained."""
    (tmp_path / "user").mkdir()
    script = """
        import os
        from autofit.training.scripts.leave import Enough
        open("rows", "w").write("made")
        try:
            raise Enough("what it trains")
        finally:
            os.makedirs("final/best")
            open("final/best/weights", "w").write("random")
            open("done", "w").write("trained")
            open("rows", "a").write(", read")
    """
    ledger = tmp_path / "jobs/trials/one/ledger"
    ended(begun(tmp_path / "user", ledger, script, stays=True), ledger, said=False)
    assert sorted(one.name for one in (tmp_path / "user").iterdir()) == ["one.py", "rows"]
    assert (tmp_path / "user/rows").read_text() == "made, read"


def test_a_very_large_log_is_not_copied(tmp_path):
    (tmp_path / "user").mkdir()
    for name in ("log", "model"):
        with (tmp_path / "user" / name).open("wb") as large:
            large.truncate(1 << 30)
        os.utime(tmp_path / "user" / name, (1e9, 1e9))
    script = """
        import os, shutil
        free = shutil.disk_usage(".").free
        open("log", "a").write("new")
        os.rename("model", "model.old")
        assert free - shutil.disk_usage(".").free < 500 << 20
    """
    ledger = tmp_path / "jobs/trials/one/ledger"
    ended(begun(tmp_path / "user", ledger, script), ledger)
    assert sorted(one.name for one in (tmp_path / "user").iterdir()) == ["log", "model", "one.py"]
    shutil.rmtree(tmp_path / "user")


class Stopped(BaseException):
    """As a signal's handler ends a process; no error, which would be passed over."""


def noted(tmp_path):
    """Files that a process has written over, deleted and made, and the ledger that tells of it."""
    user, ledger = tmp_path / "user", tmp_path / "ledger"
    aside = user / ASIDE
    aside.mkdir(parents=True)
    for number in range(3):
        note(ledger, user / f"{number}", aside / f"{number}")
        (user / f"{number}").write_text("new")
        (aside / f"{number}").write_text("old")
    note(ledger, user / "folder", aside / "folder")
    (user / "folder").mkdir()
    (user / "folder/new").write_text("new")
    (aside / "folder").mkdir()
    (aside / "folder/file").write_text("old")
    note(ledger, user / "moved", user / "away")
    (user / "away").write_text("old")
    note(ledger, user / "made")
    note(ledger, user / "made/inside")
    (user / "made").mkdir()
    (user / "made/inside").write_text("new")
    return user, ledger


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("done", [True, False])
def test_who_is_stopped_while_files_are_put_back_is_followed_by_another(tmp_path, monkeypatch, goes_on, done):
    """Stopped before, or after, each change that is made to the file system; what follows is its handler, or later."""
    changes = {name: getattr(os, name) for name in ("replace", "truncate", "unlink", "rmdir", "mkdir")}
    for stop in itertools.count(1):
        user, ledger = noted(tmp_path / f"{stop}")
        left = iter(range(stop - 1, -1, -1))

        def change(act, *args, left=left, ledger=ledger, **how):
            last = next(left, None) == 0
            try:
                if done or not last:
                    act(*args, **how)
            finally:
                if last:
                    if goes_on:
                        put_back(ledger)
                    raise Stopped

        with monkeypatch.context() as patches:
            for name, act in changes.items():
                patches.setattr(os, name, functools.partial(change, act))
            stopped = False
            try:
                put_back(ledger)
            except Stopped:
                stopped = True
        put_back(ledger)
        assert files(user) == {"0": "old", "1": "old", "2": "old", "folder/file": "old", "moved": "old"}
        assert sorted(one.name for one in user.iterdir()) == ["0", "1", "2", "folder", "moved"]
        assert not ledger.exists()
        if not stopped:
            break
    assert stop > 20


@pytest.mark.parametrize("how", ["w", "a"])
def test_what_can_not_be_moved_aside_on_a_full_disk_is_not_written_over(tmp_path, how):
    """There is no room for a line of the ledger; nor is there for what the script writes."""
    (tmp_path / "user").mkdir()
    log = tmp_path / "user/log"
    log.write_text("old")
    os.utime(log, (1e9, 1e9))
    ledger = tmp_path / "jobs/trials/one/ledger"
    ledger.parent.mkdir(parents=True)
    ledger.symlink_to("/dev/full")
    script = f"""
        try:
            with open("log", "{how}") as log:
                log.write("new")
        except OSError as error:
            open("/dev/stderr", "w").write(f"told: {{error}}")
    """
    process = begun(tmp_path / "user", ledger, script)
    _, words = process.communicate("\n\n", timeout=60)
    assert "told: [Errno 28]" in words or how == "a"
    assert log.read_text() == ("old" if how == "w" else "oldnew")
