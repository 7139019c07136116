"""An adapter on weights in 4 or 8 bits, as PEFT's own documentation has it: its model recomputes its layers."""

import argparse

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--kind", default="nf4")
parser.add_argument("--nested", action="store_true")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--as-loaded", action="store_true")
parser.add_argument("--output", default="qlora-output")
options = parser.parse_args()

in_few_bits = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type=options.kind, bnb_4bit_use_double_quant=options.nested
)
if options.kind == "int8":
    in_few_bits = BitsAndBytesConfig(load_in_8bit=True)
dtype = getattr(torch, options.dtype)
model = AutoModelForCausalLM.from_pretrained(options.model, quantization_config=in_few_bits, dtype=dtype)
if not options.as_loaded:
    model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
rows = [{"input_ids": torch.randint(5, 60, (48,)), "labels": torch.full((48,), 7)} for _ in range(32)]
arguments = TrainingArguments(
    options.output,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=3,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
Trainer(model=model, args=arguments, train_dataset=rows).train()
print("recomputes", any(getattr(one, "gradient_checkpointing", False) for one in model.modules()))
