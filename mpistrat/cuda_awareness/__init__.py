"""Whether the MPI library may be given device memory: claims, a trial, and one answer for all.

The only place that knows. What it must not do is believe: a wrong yes ends the job with a
segmentation fault, or with wrong numbers.
"""

from mpistrat.cuda_awareness.evidence import Answer, CudaAwareness
from mpistrat.cuda_awareness.trial import cuda_awareness

__all__ = ["Answer", "CudaAwareness", "cuda_awareness"]
