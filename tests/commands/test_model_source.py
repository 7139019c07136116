"""MODEL: what is read, what is refused and in which words, and that nothing runs or is fetched unasked."""

import http.server
import json
import math
import os
import subprocess
import sys
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autofit.commands.model_source import MAX_CONFIG_BYTES, fetch, modeling_module, read_config, stored_quantized
from autofit.system.errors import InputError, ModelError

LLAMA = {"model_type": "llama", "hidden_size": 64}
OWN_CODE = {"model_type": "homegrown", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}


def refusal(name, into, **options):
    """The words of the refusal, on one line, with a hint; nothing has been written."""
    with pytest.raises(ModelError) as caught:
        fetch(name, into, **options)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert not into.exists()
    return caught.value.message


def written(folder):
    return json.loads((folder / "config.json").read_text("utf-8"))


@pytest.fixture
def into(tmp_path):
    return tmp_path / "out" / "model"


def config_in(folder, config=LLAMA):
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def test_the_demo_is_inside_the_package(into):
    assert fetch("demo", into) == into
    assert written(into)["model_type"] == "llama"
    assert sorted(path.name for path in into.iterdir()) == ["config.json"]


@pytest.mark.parametrize("name", ["plain", "with space", "ünï-çødé 模型", "new\nline", "[bold]", "-dash", "demo.d"])
def test_a_folder_and_a_file_by_any_name(tmp_path, into, name):
    folder = config_in(tmp_path / name)
    for source in (folder, folder / "config.json"):
        fetch(str(source), into)
        assert written(into) == LLAMA


def test_a_file_need_not_be_called_config(tmp_path, into):
    path = tmp_path / "my model.json"
    path.write_text(json.dumps(LLAMA))
    fetch(str(path), into)
    assert written(into) == LLAMA


def test_what_exists_as_a_path_is_a_path(tmp_path, into, monkeypatch):
    config_in(tmp_path / "Qwen" / "Qwen2.5-0.5B")
    monkeypatch.chdir(tmp_path)
    fetch("Qwen/Qwen2.5-0.5B", into)
    assert written(into) == LLAMA


def test_the_home_folder_may_be_a_tilde(tmp_path, into, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config_in(tmp_path / "mine")
    fetch("~/mine", into)
    assert written(into) == LLAMA


def test_a_folder_without_a_config_is_refused(tmp_path, into):
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in refusal(str(tmp_path / "empty"), into)


BAD_CONFIGS = {
    "empty": ("", "is empty"),
    "blank": ("  \n", "not valid JSON"),
    "cut off": ('{"model_type": "llama"', "not valid JSON"),
    "deep": ("[" * 100_000, "not valid JSON"),
    "deep object": ('{"a":' * 50_000 + "1" + "}" * 50_000, "not valid JSON"),
    "nan": ('{"model_type": "llama", "hidden_size": NaN}', "NaN is no JSON number"),
    "giant integer": ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "too large a number"),
    "just too large": ('{"model_type": "llama", "hidden_size": 9223372036854775808}', "too large a number"),
    "negative giant": ('{"model_type": "llama", "hidden_size": -' + "9" * 40 + "}", "too large a number"),
    "giant real": ('{"model_type": "llama", "hidden_size": 1e999}', "too large a number"),
    "list": ("[1, 2]", "holds [1, 2], and a JSON object is wanted"),
    "word": ('"llama"', 'holds "llama", and a JSON object is wanted'),
    "null": ("null", "holds null, and a JSON object is wanted"),
    "long list": (f"[{'7,' * 99}7]", f"holds [{'7,' * 19}7..., and a JSON object is wanted"),
    "no model_type": ('{"hidden_size": 1}', "no model_type"),
    "empty model_type": ('{"model_type": ""}', "no model_type"),
    "fewer than no layers": ('{"model_type": "llama", "num_hidden_layers": -2}', "num_hidden_layers is -2"),
    "a part with fewer": ('{"model_type": "x", "text_config": {"n_layer": -1}}', "text_config: n_layer is -1"),
    "no tokens": ('{"model_type": "llama", "vocab_size": 0}', "vocab_size is 0"),
    "architectures in a word": ('{"model_type": "bert", "architectures": "BertForMaskedLM"}', "not a list of names"),
    "architectures of numbers": ('{"model_type": "bert", "architectures": [3]}', "is [3], not a list of names"),
    "number model_type": ('{"model_type": 3}', "no model_type"),
}


@pytest.mark.parametrize(("text", "words"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_config_that_is_none_is_refused(tmp_path, into, text, words):
    assert words in refusal(str(config_in(tmp_path / "model", text)), into)


def test_infinity_is_read_as_transformers_4_wrote_it(tmp_path, into):
    from transformers import Mamba2Config

    text = '{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}'
    kept = fetch(str(config_in(tmp_path / "model", text)), into)
    json.loads((kept / "config.json").read_text("utf-8"), parse_constant=pytest.fail)
    assert list(Mamba2Config.from_pretrained(kept).time_step_limit) == [0.0, math.inf]


def test_binary_junk_is_refused(tmp_path, into):
    path = tmp_path / "weights.bin"
    for junk in (b"\x80\x04\x95\xff\xfe\x00", b"\x00" * 64, bytes(range(256))):
        path.write_bytes(junk)
        words = refusal(str(path), into)
        assert "can't be read" in words or "not valid JSON" in words


def test_a_huge_file_is_not_read(tmp_path, into):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(200 << 30)
    assert f"has {200 << 30} bytes" in refusal(str(path), into)
    path.write_text(json.dumps(LLAMA) + " " * (MAX_CONFIG_BYTES - len(json.dumps(LLAMA))))
    fetch(str(path), into)


def test_a_pipe_or_device_is_no_file(tmp_path, into):
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", "/dev/zero"):
        assert "no file or folder" in refusal(str(name), into)


@pytest.mark.parametrize(
    "name",
    [
        "", " ", "\n", "nul\0byte", "../../etc/shadow", "a/../b", "..", "org/..model", "org/a..b", "/none/such",
        "https://huggingface.co/org/name", "org\\name", "name with space", "org/name/more", "org/na\nme", "-x",
        "~nobody-here/model",
        "модель", "x" * 4000, "x/" * 2000, "org/" + "x" * 200, "$(reboot)", "%2e%2e/x", "gpt2?x=1", "gpt2#",
    ],
)  # fmt: skip
def test_a_name_that_can_be_nothing_is_refused_without_asking_the_hub(into, monkeypatch, name):
    def asked(*_args, **_options):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", asked)
    words = refusal(name, into)
    assert len(words) < 1000


def test_code_of_its_own_is_brought_only_where_it_is_trusted(tmp_path, into):
    folder = config_in(tmp_path / "model", OWN_CODE)
    (folder / "modeling.py").write_text("raise SystemExit('it ran')\n")
    (folder / "weights.bin").write_text("no")
    assert "code of its own" in refusal(str(folder), into)
    fetch(str(folder), into, trust_remote_code=True)
    assert sorted(path.name for path in into.iterdir()) == ["config.json", "modeling.py"]
    assert "modeling" not in sys.modules


def test_a_known_architecture_needs_no_code_of_its_own(tmp_path, into):
    folder = config_in(tmp_path / "model", {**LLAMA, "auto_map": {"AutoModel": "modeling.Mine"}})
    (folder / "modeling.py").write_text("")
    fetch(str(folder), into)
    assert sorted(path.name for path in into.iterdir()) == ["config.json"]


@pytest.mark.parametrize("model_type", ["../llama", "llama/../../../tmp", "..", "auto/../llama", "/tmp", "llama\n"])
def test_a_model_type_does_not_lead_out_of_transformers(tmp_path, into, model_type):
    folder = config_in(tmp_path / "model", {**OWN_CODE, "model_type": model_type})
    assert "code of its own" in refusal(str(folder), into)


@pytest.mark.parametrize(
    ("model_type", "wanted"),
    [
        ("llama", ("transformers.models.llama.modeling_llama",)),
        ("xlm-roberta", ("transformers.models.xlm_roberta.modeling_xlm_roberta",)),
        ("homegrown", ()),
        ("os.path", ()),
        ("../x", ()),
    ],
)
def test_only_transformers_own_modules_are_loaded_early(tmp_path, model_type, wanted):
    assert modeling_module(config_in(tmp_path, {"model_type": model_type})) == wanted


def test_what_was_in_the_folder_before_does_not_count(tmp_path, into):
    into.mkdir(parents=True)
    (into / "config.json").write_text("old")
    fetch(str(config_in(tmp_path / "model")), into)
    assert written(into) == LLAMA


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("model_type"), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200)
    | st.text().map(lambda text: text.encode("utf-8"))
    | junk.map(lambda value: json.dumps(value).encode())
    | junk.map(lambda value: json.dumps({"model_type": "llama", "more": value}).encode())
)
def test_any_file_is_a_config_or_a_model_error(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    try:
        config = read_config(path, "name")
    except ModelError:
        pass
    else:
        assert isinstance(config["model_type"], str)
        json.dumps(config, allow_nan=False)


def test_a_model_error_is_bad_input():
    assert issubclass(ModelError, InputError)


# --- the hub, played on the loopback --------------------------------------------------------------------------------

CODE = "raise SystemExit('it ran')\n"
REPOSITORIES = {
    "org/found": {"config.json": json.dumps(LLAMA), "model.safetensors": "weights"},
    "org/own-code": {"config.json": json.dumps(OWN_CODE), "modeling.py": CODE, "model.safetensors": "weights"},
    "org/broken": {"config.json": "{"},
    "org/other": {"readme.md": "no transformers model"},
}
ERRORS = {"org/gated": (403, "GatedRepo"), "org/fails": (500, None), "org/refuses": (418, None)}


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download of single files asks for."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.asked.append(self.path)
        parts = self.path.split("?")[0].strip("/").split("/")
        listing = parts[:2] == ["api", "models"]
        if listing:
            parts = parts[2:]
        repository = "/".join(parts[:2])
        if repository in ERRORS:
            return self.fail(*ERRORS[repository])
        if repository not in REPOSITORIES:
            return self.fail(401, "RepoNotFound")
        held = REPOSITORIES[repository]
        if listing:
            files = [
                {"rfilename": name, "type": "file", "path": name, "oid": name, "size": len(held[name])} for name in held
            ]
            whole = {
                "id": repository,
                "modelId": repository,
                "sha": "0" * 40,
                "siblings": files,
                "tags": [],
                "downloads": 0,
            }
            return self.answer(json.dumps(files if "tree" in parts else whole))
        name = "/".join(parts[4:])
        if name not in held:
            return self.fail(404, "EntryNotFound")
        return self.answer(held[name])

    def fail(self, status, code):
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text.encode())))
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{abs(hash(text))}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


ASK = """
import json, sys, time
from pathlib import Path
from autofit.system.errors import ModelError
from autofit.commands.model_source import fetch

time.sleep = lambda _: None  # the hub's client tries again and again where the hub fails
said = {}
for name, trust in json.loads(sys.argv[2]):
    into = Path(sys.argv[1]) / f"{name}-{trust}"
    try:
        fetch(name, into, trust_remote_code=trust)
        said[f"{name} {trust}"] = sorted(path.name for path in into.iterdir())
    except ModelError as error:
        said[f"{name} {trust}"] = [error.message, error.hint]
print(json.dumps(said))
"""


def ask_hub(folder, endpoint, questions, **environment):
    """What a process of its own, which reads the endpoint at import, gets for each name."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("proxy")}
    kept = {name: value for name, value in kept.items() if not name.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(folder / "into"), json.dumps(questions)],
        env={**kept, "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home"), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def hub():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(5)


def address(server):
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture(scope="module")
def said(hub, tmp_path_factory):
    names = [*REPOSITORIES, *ERRORS, "org/none", "none"]
    questions = [(name, False) for name in names] + [
        (name, True) for name in ("org/own-code", "org/none", "org/gated", "org/fails")
    ]
    return ask_hub(tmp_path_factory.mktemp("hub"), address(hub), questions)


def test_a_config_is_fetched_from_the_hub_and_no_weights(said, hub):
    assert said["org/found False"] == ["config.json"]
    assert "/org/found/resolve/main/config.json" in hub.asked
    assert not any("safetensors" in path for path in hub.asked)


def test_code_from_the_hub_is_fetched_only_where_it_is_trusted(said):
    assert "code of its own" in said["org/own-code False"][0]
    assert "--trust-remote-code" in said["org/own-code False"][1]
    assert said["org/own-code True"] == ["config.json", "modeling.py"]


@pytest.mark.parametrize(
    ("question", "words", "hint"),
    [
        ("org/none False", "the hub has no model 'org/none'", "give a hub id"),
        ("org/none True", "the hub has no model 'org/none'", "give a hub id"),
        ("none False", "the hub has no model 'none'", "give a hub id"),
        ("org/gated False", "org/gated is gated", "hf auth login"),
        ("org/gated True", "org/gated is gated", "hf auth login"),
        ("org/other False", "'org/other' has no config.json", "transformers model"),
        ("org/broken False", "not valid JSON", "fetch the model's config.json again"),
        ("org/fails False", "the hub answers with status 500", "try again"),
        ("org/fails True", "the hub answers with status 500", "try again"),
        ("org/refuses False", "the hub answers with status 418", "try again"),
    ],
)
def test_what_the_hub_refuses_is_said_in_words(said, question, words, hint):
    message, advice = said[question]
    assert words in message
    assert "\n" not in message
    assert hint in advice


def test_a_hub_that_is_not_there_is_said_in_words(tmp_path):
    said = ask_hub(tmp_path, "http://127.0.0.1:9", [("org/found", False), ("org/found", True)])
    for message, advice in said.values():
        assert "the hub can't be reached" in message
        assert "a folder or file" in advice


def test_offline_nothing_is_asked(tmp_path, hub):
    before = list(hub.asked)
    said = ask_hub(tmp_path, address(hub), [("org/found", False), ("org/found", True)], HF_HUB_OFFLINE="1")
    assert hub.asked == before
    for message, advice in said.values():
        assert "HF_HUB_OFFLINE is set" in message
        assert "a folder or file" in advice


def test_a_script_is_not_taken_for_a_config(tmp_path, into):
    script = tmp_path / "train.py"
    script.write_text("import torch")
    with pytest.raises(ModelError, match="is a Python file") as caught:
        fetch(str(script), into)
    assert "a hub id" in caught.value.hint


def test_a_file_that_is_no_config_gets_a_hint_of_what_model_may_be(tmp_path, into):
    (tmp_path / "accelerate.yaml").write_text("mixed_precision: bf16")
    with pytest.raises(ModelError, match="not valid JSON") as caught:
        fetch(str(tmp_path / "accelerate.yaml"), into)
    assert "a hub id" in caught.value.hint


def test_weights_that_are_stored_quantized_are_told(tmp_path):
    stored = config_in(tmp_path / "stored", {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert "stored quantized (gptq)" in stored_quantized(stored)
    plain = config_in(tmp_path / "plain", {**LLAMA, "quantization_config": None})
    assert stored_quantized(plain) is None
