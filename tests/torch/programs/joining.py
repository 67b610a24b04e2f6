"""How the programs beside this one start torch.distributed."""

import torch.distributed as dist

import mpistrat.torch as mst


def join():
    """Start it over MPI, or with gloo under torchrun, and return rank and size."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        mst.init()
    return dist.get_rank(), dist.get_world_size()
