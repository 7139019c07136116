"""Why the split of a plain loop's batch is its own, or its micro-batch is, in words."""

MANUAL = "it does not train in `with accelerator.accumulate(model):`, so how often it steps is its own"
LOADER = "its loader makes its micro-batches itself"
SEVERAL = "it takes the batches of several loaders together"
AHEAD = "it takes several batches before it trains on the first, so how many is its own"
CLEARS_FIRST = "it clears its gradients before each backward pass, and so those of a step's earlier micro-batches"
CLEARS = "it clears its gradients otherwise than by its prepared optimizer, which waits until they have accumulated"
CHANGES = "it changes its gradients with each batch, as by clipping them, and not with each optimizer step"
CARRIES = "its gradients accumulate over an epoch's end (sync_with_dataloader=False)"
RATE = "it changes its learning rate with each batch, and not with each optimizer step"
AVERAGES = "it counts each batch for LocalSGD, which averages the weights of its processes after so many"
GRADIENTS = "it works with the gradients of each batch, or fails where there are none"
FAILS = "it fails where a batch has other rows than its micro-batch"
KEEPS_AVERAGES = (
    "it changes as many numbers as its model has weights with each batch, as where it averages these, and not with "
    "each optimizer step"
)
WRITES = "it changes its model's weights with each batch, and not with each optimizer step alone"
HOOKS = "it has a hook on its model's weights change the gradients of each backward pass, and not those of a step"
UNSTEADY = (
    "its loss of the same rows is another one with each batch, as where it counts its batches, or keeps something of "
    "each, such as a queue or a mean"
)
BUFFERS = "its model changes its {} with each micro-batch"
TOGETHER = (
    "its loss of several rows is neither the sum nor a mean of theirs: it takes the rows of a micro-batch together"
)
SUMS_OF_TRAINER = (
    "its loss is a sum over the rows of a micro-batch, and its Trainer divides it by the number of micro-batches "
    "alone: its gradients would grow with the micro-batch"
)
SAMPLES = (
    "its get_batch_samples() says something else of the same rows in more micro-batches: how many they are, or what "
    "their loss is divided by"
)
BLENDS = "its collator takes the rows of a micro-batch together: what it makes of a row depends on the others"
