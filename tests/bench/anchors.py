"""Published pairs of runs: does a trace find what a technique was seen to do, in direction and in size?

    python tests/bench/anchors.py [--json] [--only qwen,bert-large]

The programs that were measured are written out and run under fake tensors. No number is fitted, but *qwen* and *bert*
do not state all of their program: what is taken below was picked among a few readings with the figures in view, so that
their errors show that such a reading exists, and predict nothing. (autofit's own plan of the first, with a fused AdamW
and allocated bytes, is 14.1 GB where 20.31 is published; *bert* with only its inner attention and GELU in checkpoints
is 68 to 168 % above.) *bert-large* states its program. Then plans of autofit itself: the accumulation that a known
piece of advice prefers, and a model of seven billion parameters under small and large ceilings. The last line is one
JSON object; the exit code is 4 where a direction is not the published one, pairs less than 10 % apart left out.

- *qwen*: "A Hitchhiker's Guide to Training Deep Learning Models": Qwen2.5-1.5B at 1 x 1024 in bfloat16, full and LoRA
  of rank 4, attention and MLP modules in non-reentrant checkpoints. GB as printed. Taken: PyTorch's default AdamW
  (for-each), LoRA on every linear layer, and that the counter is ``max_memory_reserved``.
- *bert*: "Efficient GPU Utilization": BERT classifies, attention and GELU in checkpoints. MB as printed. Neither size,
  length nor precision are stated. Taken: the base size, 512 tokens, the blocks of attention and of GELU in checkpoints,
  512 MiB of context; once under 16-bit autocast and once with 16-bit weights, between which the figures should lie.
- *bert-large*: Hugging Face's page on a single GPU, by NVML, on a V100: 8-bit against 32-bit Adam, and 1 x 4 against
  4 x 1 rows.
"""

import argparse
import functools
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.utils.checkpoint
from published import bert, fake

from autofit.commands.estimates.estimate import estimate
from autofit.costmodel.memory import allocator
from autofit.output.plan_words import chosen_words
from autofit.system.units import GIB, MIB

QWEN = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
SEVEN = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
CONTEXT_BYTES = 512 * MIB


def checkpointed(forward):
    """Computed again in the backward pass."""

    @functools.wraps(forward)
    def again(*args, **kwargs):
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return again


# -- the programs -----------------------------------------------------------------------------------------------------


def qwen(rank, again):
    """Bytes reserved by two steps."""

    def build():
        from peft import LoraConfig, get_peft_model
        from transformers import Qwen2Config, Qwen2ForCausalLM

        model = Qwen2ForCausalLM(Qwen2Config(**QWEN, use_cache=False)).to(torch.bfloat16).train()
        if rank:
            lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, lora, low_cpu_mem_usage=True)
        for module in list(model.modules()) if again else ():
            if type(module).__name__ in {"Qwen2Attention", "Qwen2MLP"}:
                module.forward = checkpointed(module.forward)
        return model

    def steps(model, watch):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, foreach=True)
        for _ in range(2):
            watch.mark("pre")
            ids = torch.empty(1, 1024, dtype=torch.int64)
            model(input_ids=ids, labels=ids).loss.backward()
            watch.mark("step")
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            watch.step += 1

    return fake.peak_of(fake.run(build, steps, shorten=False)).reserved_bytes


def small_bert(batch, again, *, half):
    """Bytes reserved by two steps, and the context."""

    def build():
        from transformers import BertConfig, BertForSequenceClassification

        model = BertForSequenceClassification(BertConfig(attn_implementation="eager", use_cache=False)).train()
        for layer in model.bert.encoder.layer if again else ():
            layer.attention.forward = checkpointed(layer.attention.forward)
            layer.feed_forward_chunk = checkpointed(layer.feed_forward_chunk)
        return model.to(torch.bfloat16) if half else model

    def steps(model, watch):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            watch.mark("pre")
            ids = torch.empty(batch, 512, dtype=torch.int64)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not half):
                loss = model(input_ids=ids, labels=torch.empty(batch, dtype=torch.int64)).loss
            loss.backward()
            watch.mark("step")
            optimizer.step()
            optimizer.zero_grad()
            watch.step += 1

    tape = fake.run(build, steps, shorten=False)
    return CONTEXT_BYTES + allocator.replay(tape.events, tape.bytes_at(0)).peak_reserved_bytes


def large_bert(batch, accumulation, optimizer):
    """What NVML says after training."""
    run = bert.Run(
        batch=batch, rows=512, accumulation=accumulation, mixed=False, checkpointing=False, optimizer=optimizer
    )
    return bert.predict(run)


ANCHORS = {
    "qwen": [
        ("full, all kept", 20.31e9, lambda: qwen(0, again=False)),
        ("full, checkpoints", 18.12e9, lambda: qwen(0, again=True)),
        ("LoRA, all kept", 9.68e9, lambda: qwen(4, again=False)),
        ("LoRA, checkpoints", 7.068e9, lambda: qwen(4, again=True)),
    ],
    **{
        f"bert-{words}": [
            ("24 rows, all kept", 10972 * MIB, functools.partial(small_bert, 24, again=False, half=half)),
            ("24 rows, checkpoints", 3944 * MIB, functools.partial(small_bert, 24, again=True, half=half)),
            ("132 rows, checkpoints", 10212 * MIB, functools.partial(small_bert, 132, again=True, half=half)),
        ]
        for words, half in (("autocast", False), ("16bit", True))
    },
    "bert-large": [
        ("AdamW, 4 x 1 rows", 14949 * MIB, lambda: large_bert(4, 1, "adamw")),
        ("8-bit Adam, 4 x 1 rows", 13085 * MIB, lambda: large_bert(4, 1, "adam8bit")),
        ("AdamW, 1 x 4 rows", 8681 * MIB, lambda: large_bert(1, 4, "adamw")),
    ],
}


def anchored(name):
    """Each run of a source, published and predicted; and whether every pair of them lies in the published order."""
    runs = [
        {"run": f"{name}: {words}", "published_bytes": round(published), "predicted_bytes": round(predict())}
        for words, published, predict in ANCHORS[name]
    ]
    for one in runs:
        one["error"] = round(one["predicted_bytes"] / one["published_bytes"] - 1, 4)
    ordered = all(
        (one["published_bytes"] < other["published_bytes"]) == (one["predicted_bytes"] < other["predicted_bytes"])
        for one in runs
        for other in runs
        if abs(one["published_bytes"] / other["published_bytes"] - 1) > 0.1
    )
    return runs, ordered


# -- plans of autofit -------------------------------------------------------------------------------------------------


def accumulated(config):
    """4 x 16 rows against 1 x 64, all else the same: more memory, and more speed."""
    pair = {}
    for rows in (4, 1):
        found = estimate(
            config, gpu="RTX 4090", seq_len=1024, global_batch=64,
            fix=(f"micro_batch={rows}", "precision=bf16", "checkpointing=full", "kernels=none", "optimizer=adamw_8bit",
                 "offload=none", "compile=off"),
        )  # fmt: skip
        (one,) = found.plans
        pair[rows] = {
            "run": f"{rows} x {64 // rows} rows",
            "predicted_bytes": one.need.peak_bytes,
            "samples_per_second": round(one.samples_per_second, 3),
        }
    slower, faster = pair[1], pair[4]
    kept = (
        faster["samples_per_second"] > slower["samples_per_second"]
        and faster["predicted_bytes"] > slower["predicted_bytes"]
    )
    return [faster, slower], kept


def recommended(config):
    """The fastest plan that fits, on cards of several sizes."""
    found = []
    for gpu, memory in (("RTX 4060", None), (None, "8GiB"), ("RTX 4090", None), ("A100-80GB", None)):
        answer = estimate(
            config, gpu=gpu, memory=memory, seq_len=1024, global_batch=32, allow="exact,numeric,method",
            among=("precision=bf16,bf16_weights", "optimizer=adamw,adamw_8bit", "offload=none"), most=4,
        )  # fmt: skip
        first = answer.plans[0]
        plan = answer.recommended
        found.append({
            "run": f"7B on {gpu or memory}",
            "memory_bytes": answer.memory_bytes,
            "plan": None if plan is None else f"{plan['micro_batch']} x {plan['accumulation']} {chosen_words(plan)}",
            "quantized": plan is not None and plan["quantization"] != "none",
            "device_bytes": first.device_bytes,
            "samples_per_second": None if first.samples_per_second is None else round(first.samples_per_second, 3),
        })  # fmt: skip
    small, sized, _, large = found
    kept = small["quantized"] and sized["quantized"] and not large["quantized"]
    return found, bool(kept and large["samples_per_second"] > small["samples_per_second"])


def main():
    """Everything, and whether each direction is the published one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join([*ANCHORS, "accumulation", "sizes"]))
    parser.add_argument("--json", action="store_true", help="print the JSON object alone")
    options = parser.parse_args()
    result = {"runs": [], "kept": {}}
    with tempfile.TemporaryDirectory() as scratch:
        models = {
            "accumulation": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **QWEN},
            "sizes": SEVEN,
        }
        for name in options.only.split(","):
            if name in ANCHORS:
                runs, kept = anchored(name)
            else:
                config = Path(scratch) / f"{name}.json"
                config.write_text(json.dumps(models[name]))
                runs, kept = {"accumulation": accumulated, "sizes": recommended}[name](str(config))
            result["runs"] += runs
            result["kept"][name] = kept
            for one in runs if not options.json else ():
                words = [f"{one['run']:36}"]
                if "published_bytes" in one:
                    words.append(f"published {one['published_bytes'] / GIB:6.2f} GiB")
                words.append(f"predicted {one.get('predicted_bytes', one.get('device_bytes')) / GIB:6.2f} GiB")
                words += [f"{one['error']:+.1%}"] if "error" in one else []
                words += [f"{one['samples_per_second']} samples/s"] if one.get("samples_per_second") else []
                words += [str(one["plan"])] if "plan" in one else []
                print("  ".join(words), flush=True)
    print(json.dumps(result))
    sys.exit(0 if all(result["kept"].values()) else 4)


if __name__ == "__main__":
    main()
