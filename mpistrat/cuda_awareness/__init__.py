"""CUDA-awareness of the MPI library: evidence, a trial, and one answer for all ranks.

Evidence alone is not believed, because a wrong yes ends the job with a segmentation fault or with
wrong numbers.
"""

from mpistrat.cuda_awareness.evidence import Answer, CudaAwareness

__all__ = ["Answer", "CudaAwareness"]
