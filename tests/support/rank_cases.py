"""Plans of several ranks that the guard has to pass, and defects of ranks that a tune has to refuse.

Data, hybrid, tensor and context parallelism over gloo, as Accelerate makes them of its YAML where it takes the CPU for
a GPU (``tests/support/cpu_shim.py``). Each defect is patched into the ranks' processes, and is refused by the guard, or
before it by what the ranks of a trial say of themselves. ``tests/bench/guard_bench.py --ranks`` looks at all of them.
"""

from autofit.contract.layout import layout_of
from tests.support.guard_cases import BATCH, TOOLS, Case, plan

MODULES = ("faulty", "cpu_shim")
"""What the fork server loads."""
PROCESSES = {"ddp": 2, "fsdp": 2, "hsdp:2x2": 4, "tp2xfsdp1": 2, "tp2xfsdp2": 4, "cp2xfsdp1": 2, "cp2xfsdp2": 4}
_SHARDED = ("fsdp", "hsdp:2x2", "tp2xfsdp2", "cp2xfsdp1", "cp2xfsdp2")
_TENSOR, _CONTEXT = ("tp2xfsdp1", "tp2xfsdp2"), ("cp2xfsdp1", "cp2xfsdp2")
_TOOLS = (
    TOOLS
    + """
import dataclasses, os
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn.parallel import DistributedDataParallel as Ddp
from transformers import Trainer
from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel
from autofit.training.guard import loss_curve

def rank():
    return int(os.environ["RANK"])
def last():
    return rank() == int(os.environ["WORLD_SIZE"]) - 1
def scaled(factor, backward=Accelerator.backward):
    calls = [0]
    def scaling(self, loss, **kwargs):
        calls[0] += 1
        backward(self, loss * factor(calls[0]), **kwargs)
    Accelerator.backward = scaling

def alone(self, *args, forward=Ddp.forward, **kwargs):
    self.require_backward_grad_sync = False
    return forward(self, *args, **kwargs)
def hooked(hook, begin=Ddp.__init__):
    def begun(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.register_comm_hook(None, hook)
    Ddp.__init__ = begun
def ignoring(m):
    names = [name for name, one in m.named_parameters() if one is matrix(m)]
    Ddp._set_params_and_buffers_to_ignore_for_model(m, names)

class Changed:
    def __init__(self, of, **others):
        self.__dict__.update(others, of=of)
    def __getattr__(self, name):
        return getattr(self.of, name)
def unscattered(send=collectives.DefaultReduceScatter.__call__, reduce=FSDPParamGroup.post_backward):
    unit = [""]
    def reducing(self, *args):
        unit[0] = self._module_fqn or ""
        return reduce(self, *args)
    def sending(self, output_tensor, input_tensor, group, op, async_op=False):
        if unit[0].endswith("layers.1"):
            return output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        return send(self, output_tensor, input_tensor, group, op, async_op)
    FSDPParamGroup.post_backward, collectives.DefaultReduceScatter.__call__ = reducing, sending
def halved(self, output_tensor, *args, send=collectives.DefaultReduceScatter.__call__, **kwargs):
    send(self, output_tensor, *args, **kwargs)
    output_tensor.div_(2)

def one_of(style, method, suffix, change):
    usual, chosen = getattr(style, method), []
    def changed(self, module, *args):
        return (change if any(module is one for one in chosen) else usual)(self, module, *args)
    setattr(style, method, changed)
    spoil(lambda m: chosen.extend(one for name, one in layers(m)[1].named_modules() if name.endswith(suffix)))
def unsummed(self, module, output, mesh):
    return output.to_local()
def summed_twice(self, module, output, mesh, usual=RowwiseParallel.transform_output_post_forward):
    return usual(self, module, output, mesh) * mesh.size()
def unsummed_back(self, module, args, kwargs, mesh):
    return (DTensor.from_local(args[0], mesh, [Replicate()], grad_placements=[Partial()]), *args[1:]), kwargs
def drawing(m):
    layers(m)[1].mlp.drop = torch.nn.Dropout(0.1)
    layers(m)[1].mlp.register_forward_hook(lambda module, _, out: module.drop(out))
    drawn = []
    m.register_forward_pre_hook(lambda *_: None if drawn else drawn.append(torch.manual_seed(rank())))

def from_zero(kwargs):
    tokens = kwargs["input_ids"]
    return {**kwargs, "position_ids": torch.arange(tokens.shape[1]).expand_as(tokens)}
def cut(kwargs):
    labels = kwargs["shift_labels"].clone()
    labels[:, labels.shape[1] // 2 - 1 :: labels.shape[1] // 2] = -100
    return {**kwargs, "shift_labels": labels}
def within(group, seq_dim, op, query, key, value, is_causal=False, **kwargs):
    return op(query, key, value, is_causal=is_causal, **kwargs)
def within_back(group, seq_dim, op, grad_out, grad_out_name, query, key, value, out, logsumexp, is_causal, **kwargs):
    return op(grad_out, query, key, value, out, logsumexp, is_causal=is_causal, **kwargs)
"""
)
_ROWS = """
rows = loss_curve.learnable_rows
def others(recipe, count, model):
    work = dataclasses.replace(recipe.facts.workload, seed=rank())
    return rows(dataclasses.replace(recipe, facts=dataclasses.replace(recipe.facts, workload=work)), count, model)
loss_curve.learnable_rows = others
"""
DEFECTS = {
    # of any layout
    "a rank with another seed, and other rows": (tuple(PROCESSES), _ROWS),
    "a rank's learning rate is 1.3 times as high": (
        tuple(PROCESSES), "every_group(lambda group: group.update(lr=(1.3 if last() else 1.0) * 1e-3))",
    ),
    "a rank does not step": (
        tuple(PROCESSES), "every_group(lambda group: group.update(lr=0.0 if last() else 1e-3))",
    ),
    "a rank's gradients are doubled": (tuple(PROCESSES), "scaled(lambda call: 2 if last() else 1)"),
    "a rank drops every second micro-batch": (tuple(PROCESSES), "scaled(lambda call: 0 if last() and call % 2 else 1)"),
    # of data parallelism
    "no all-reduce": (("ddp",), "Ddp.forward = alone"),
    "one weight has no all-reduce": (("ddp",), "spoil(ignoring)"),
    "an average taken twice": (
        ("ddp",), "hooked(lambda state, bucket: allreduce_hook(None, bucket).then(lambda done: done.value() / 2))",
    ),
    "gradients are summed and not averaged": (
        ("ddp",), "hooked(lambda state, bucket: allreduce_hook(None, bucket).then(lambda done: done.value() * 2))",
    ),
    # of sharding
    "a layer's gradients are not reduced": (_SHARDED, "unscattered()"),
    "an average over the shards taken twice": (_SHARDED, "collectives.DefaultReduceScatter.__call__ = halved"),
    "the replicas have no all-reduce": (
        ("hsdp:2x2",), "collectives.dist = Changed(distributed, all_reduce=lambda *_, **__: None)",
    ),
    "an average over the replicas taken twice": (
        ("hsdp:2x2",),
        "collectives.dist = Changed(distributed, all_reduce=lambda t, **k: distributed.all_reduce(t.div_(2), **k))",
    ),
    # of tensor parallelism
    "a row-wise product is not summed": (
        _TENSOR, "one_of(RowwiseParallel, 'transform_output_post_forward', 'down_proj', unsummed)",
    ),
    "a row-wise product is summed twice": (
        _TENSOR, "one_of(RowwiseParallel, 'transform_output_post_forward', 'down_proj', summed_twice)",
    ),
    "a column-wise product's gradient is not summed": (
        _TENSOR, "one_of(ColwiseParallel, 'transform_inputs_pre_forward', 'up_proj', unsummed_back)",
    ),
    "a rank's norms begin otherwise": (
        _TENSOR,
        "spoil(lambda m: [p.data.mul_(1.1) for n, p in m.named_parameters() if 'norm' in n and last()])",
    ),
    "a rank with another dropout mask": (_TENSOR, "spoil(drawing)"),
    # of context parallelism
    "the loss is a sum over the ranks": (_CONTEXT, "scaled(lambda call: 2)"),
    "the last labels of a part are lost": (_CONTEXT, "spoil(inputs(cut))"),
    "positions begin anew on each rank": (_CONTEXT, "spoil(inputs(from_zero))"),
    "attention stays within a rank": (_CONTEXT, "ring._templated_ring_attention = within"),
    "attention's backward pass stays within a rank": (
        _CONTEXT, "ring._templated_ring_attention_backward = within_back",
    ),
}  # fmt: skip
"""Of each defect the layouts that can have it, and what is run before the ranks begin."""
ONE_OF_MANY = "a rank's learning rate is 1.3 times as high"
"""Of eight ranks in bf16, nothing of it is seen on the first one."""
EXACT_DEFECTS = {
    "each rank's loss is the mean of its tokens": (_CONTEXT, "Trainer._get_num_items_in_batch = lambda *_: None"),
}
"""Those that 16 bits hide: of 32 tokens one has no label, so that the ranks' means have 16 and 15."""


def _plans(value):
    """The plans of a layout, by name."""
    layout = layout_of(value, PROCESSES[value])
    for precision, others in {"fp32": {"checkpointing": "full"}, "bf16": {}}.items():
        made = plan(2, parallel=value, precision=precision, **others)
        yield f"{value} {precision}", made.replaced(accumulation=BATCH // (2 * layout.data_parallel))


def honest():
    """Plans that train as one process does."""
    for value, processes in PROCESSES.items():
        for name, one in _plans(value):
            yield Case(name=name, architecture="llama", plan=one, processes=processes)


def defects():
    """Plans of which the ranks train something else."""
    for defect, (values, script) in (*DEFECTS.items(), *EXACT_DEFECTS.items()):
        for value in values:
            for name, one in list(_plans(value))[: 1 if defect in EXACT_DEFECTS else None]:
                yield Case(
                    name=name, architecture="llama", plan=one, processes=PROCESSES[value], defect=defect,
                    script=_TOOLS + script,
                )  # fmt: skip
    many, (_, script) = plan(2, parallel="ddp", precision="bf16").replaced(accumulation=1), DEFECTS[ONE_OF_MANY]
    yield Case(
        name="ddp bf16, 8 ranks", architecture="llama", plan=many, processes=8, defect=ONE_OF_MANY,
        script=_TOOLS + script,
    )  # fmt: skip
