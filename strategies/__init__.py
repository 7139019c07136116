"""The techniques, one file or folder each, strangers to one another; imported as ``autofit.strategies``.

``ALL`` is the list, in the order in which they fill the recipe. A technique may look at the values of those
before it when it says what it conflicts with.
"""

from .accumulation import Accumulation
from .adapter import Adapter
from .attention import Attention
from .batching import Batching
from .checkpointing import Checkpointing
from .compile import Compile
from .kernels import Kernels
from .loader import Loader
from .micro_batch import MicroBatch
from .offload import Offload
from .optimizer import Optimizer
from .parallel import Parallel
from .precision import Precision
from .quantization import Quantization
from .sync_each_batch import SyncEachBatch

ALL = (
    Parallel(),
    MicroBatch(),
    Accumulation(),
    SyncEachBatch(),
    Precision(),
    Attention(),
    Kernels(),
    Checkpointing(),
    Adapter(),
    Quantization(),
    Optimizer(),
    Offload(),
    Compile(),
    Batching(),
    Loader(),
)
