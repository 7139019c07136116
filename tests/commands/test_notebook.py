"""A notebook that is executed for real: the answer, an estimate, an error, and that progress is seen."""

import sys

import pytest

from tests.support.tiny import CPU_PRECISIONS

SIMPLE = (f"precision={CPU_PRECISIONS[-1]}", "kernels=none", "adapter=none", "optimizer=adamw", "compile=off")
CELLS = (
    f"""
import autofit
found = autofit.tune("demo", output="out", trials=1, seq_len=64, global_batch=4, device="cpu",
    guard=False, fix={SIMPLE})
found
""",
    'autofit.estimate("demo", gpu="H100", fix=' + repr(SIMPLE) + ")",
    'autofit.tune("demo", output="out", global_batch=8)',
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries that run a notebook
def test_a_notebook_shows_progress_answers_and_errors(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    kernel = tmp_path / "share" / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(
        f'{{"argv": ["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"], '
        '"display_name": "here", "language": "python"}'
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
        nbclient.NotebookClient(
            book, timeout=300, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
        ).execute()
    tuned, estimated, failed = ([dict(one) for one in cell.outputs] for cell in book.cells)
    progress = [one["data"]["text/plain"] for one in tuned if one["output_type"] == "display_data"]
    assert any(words.startswith("trial     0") for words in progress)
    assert "<caption>demo on " in tuned[-1]["data"]["text/html"]
    assert tuned[-1]["data"]["text/plain"].startswith("Result(")
    assert len([one for one in estimated if "data" in one]) == 1, "it is shown once"
    assert estimated[-1]["data"]["text/html"].startswith("<pre>")
    assert "H100" in estimated[-1]["data"]["text/html"]
    assert failed[-1]["ename"] == "InputError"
    assert "holds a tune of 'demo' already" in failed[-1]["evalue"]
    assert "resume=True" in failed[-1]["evalue"]
