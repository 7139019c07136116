"""Published peak-memory measurements, and the programs that were measured, run under fake tensors.

========================  =========================================================================================
``rows``                  the columns of a table of measurements -> what each says, in one vocabulary
``fake``                  a run under fake tensors -> what PyTorch's allocator would have counted
``fourbit``               bitsandbytes' 4-bit linears, as the version of the time kept and dropped tensors
``litgpt_configs``        LitGPT's model configurations
``litgpt_model``          LitGPT's models: full, LoRA, LLaMA-Adapter v1 and v2
``litgpt``                LitGPT's fine-tuning scripts, on one device
``litgpt_fsdp``           what a rank holds where they shard
``litgpt_rows``           a row of LitGPT's tables -> a run of a script
``litgpt_pretrain``       LitGPT's pre-training script without a compiler, on one card and by DDP
``bert``                  Hugging Face's page on a single GPU: bert-large with ``Trainer``
``world_rows``            a row of runs on several cards -> a run of the program that its columns describe
``nanotron``              nanotron's steps on one rank of a data- and tensor-parallel world
``nanotron_model``        its Llama
``fsdp_qlora``            LoRA and QLoRA of a Llama under FSDP 1 on one rank of several
``baselines``             the closed formulas that others use
``compare``               what they are told of a row
``predict``               a row -> a prediction, or why there is none
========================  =========================================================================================

No constant in here was fitted to a measurement: every one is a size that the source of the time states.
"""
