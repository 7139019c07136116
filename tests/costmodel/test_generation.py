"""What a Trainer's generation holds, told by two passes, beside what ``generate`` of transformers holds."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from autofit.contract.script import Script
from autofit.costmodel.scripts.generation import trace_generation
from autofit.costmodel.tracing.recorder import Recorder

ROWS, COMPLETION = 6, 80
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
    "max_position_embeddings": 512,
}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def sliding():
    """Half of its layers look at the last sixteen tokens alone."""
    kinds = ["sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=16, layer_types=kinds))


def peak_of(model, run):
    """Bytes of what is made, at most at once."""
    recorder = Recorder(stand_ins={}, fake=False)
    with recorder:
        recorder.call([*model.parameters(), *model.buffers()], "weights")
        recorder.mark("begin")
        run()
    tape = recorder.tape(since=1)
    made = tape.events >= 0
    sizes = tape.sizes[np.where(made, tape.events, ~tape.events)]
    return int(np.cumsum(np.where(made, sizes, -sizes)).max())


@pytest.mark.parametrize(
    ("make", "prompt", "half"), [(llama, 8, False), (llama, 150, False), (sliding, 8, False), (llama, 8, True)]
)
def test_two_passes_hold_what_a_generation_holds(make, prompt, half):
    """Of a short prompt the last token takes most, of a long one its own pass; values are as wide as their keys."""
    torch.manual_seed(0)
    model = make()
    tokens, mask = torch.randint(3, 200, (ROWS, prompt)), torch.ones(ROWS, prompt, dtype=torch.long)
    settings = GenerationConfig(
        max_new_tokens=COMPLETION, min_new_tokens=COMPLETION, do_sample=True, pad_token_id=0, eos_token_id=1,
        temperature=1.0, top_p=1.0, top_k=0, disable_compile=True,
    )  # fmt: skip

    def really():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            model.generate(input_ids=tokens.clone(), attention_mask=mask.clone(), generation_config=settings)

    segments = []
    marks = SimpleNamespace(accumulated=2, mark=lambda name: segments.append((marks.accumulated, name)))

    def traced():
        trainer = SimpleNamespace(model=model, max_completion_length=COMPLETION, top_k=0, top_p=1.0)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            trace_generation(trainer, marks, {"prompt_ids": tokens.clone(), "prompt_mask": mask.clone()})

    assert peak_of(model, traced) == pytest.approx(peak_of(model, really), rel=0.04)
    assert segments == [(3, "pre"), (4, "pre")], "no segment of one pass is taken for one of the other"


@pytest.mark.parametrize(
    ("at_once", "engine", "rows", "found"),
    [
        (8, "", 8, 8),
        (8, "", 16, 16),  # for as many optimizer steps as before
        (32, "", 8, 32),
        (4, "", 8, 4),
        (8, "vLLM", 8, 0),
        (0, "", 8, 0),
    ],
)
def test_as_many_rows_are_generated_at_once_as_the_scripts_own_steps_take(at_once, engine, rows, found):
    script = Script(
        path="t.py", sha256="", trainer="GRPOTrainer", micro_batch=2, accumulation=4,
        generated=16, generated_rows=at_once, engine=engine,
    )  # fmt: skip
    assert script.generated_at_once(rows) == found
