"""What was started ends with the process that started it, however that ends."""

import os
import signal
import subprocess
import sys

import pytest

from autofit.commands import launching
from autofit.commands.scripts import run as scripts
from autofit.system.files import helper_environment
from autofit.system.processes import bound_to_this

STARTS = """
import subprocess, sys
from autofit.system.processes import bound_to_this
started = subprocess.Popen(bound_to_this([sys.executable, "-c", sys.argv[1]], int(sys.argv[2])), start_new_session=True)
started.wait()
"""
WAITS = """
import signal, sys, time
def told(number, frame):
    print(signal.Signals(number).name, flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, told)
print("begun", flush=True)
time.sleep(20)
print("went on", flush=True)
"""


@pytest.mark.parametrize(("number", "words"), [(signal.SIGTERM, b"SIGTERM\n"), (signal.SIGKILL, b"")])
def test_a_command_gets_its_signal_when_what_started_it_is_killed(number, words):
    command = [sys.executable, "-c", STARTS, WAITS, str(int(number))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=helper_environment(os.environ)) as starter:
        assert starter.stdout.readline() == b"begun\n"
        starter.kill()
        assert starter.stdout.read() == words  # it ends when nobody holds the pipe


def test_a_command_does_not_begin_where_what_started_it_is_gone():
    command = list(bound_to_this([sys.executable, "-c", "print('begun')"], signal.SIGTERM))
    command[3] = str(2**22 + 1)  # above every process
    done = subprocess.run(command, capture_output=True, env=helper_environment(os.environ), check=False)
    assert (done.returncode, done.stdout) == (1, b"")


BEGINS = "import time; print('begun', flush=True); time.sleep(20); print('went on', flush=True)"
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"


@pytest.mark.parametrize("script", [launching._SCRIPT, scripts._SCRIPT], ids=["verify", "run"])
def test_a_launched_script_ends_with_its_launcher(script, tmp_path):
    for module in ("bitsandbytes", "torch", "transformers"):  # what it imports first
        (tmp_path / f"{module}.py").write_text(BEGINS)
    command = [sys.executable, "-c", LAUNCHER, str(script), str(tmp_path), "x", "1"]
    environment = helper_environment({**os.environ, "PYTHONPATH": str(tmp_path)})
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as launcher:
        assert launcher.stdout.readline() == b"begun\n"
        launcher.kill()
        assert launcher.stdout.read() == b""
