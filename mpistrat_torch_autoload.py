"""Entry points of torch: the backend ``mpistrat`` and ``mpi://`` are known after ``import torch``.

Torch imports this at its own start, so it imports nothing itself and must not raise.
"""


def autoload() -> None:
    """Register a backend and a rendezvous that import `mpistrat.torch` when they are used."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import register_rendezvous_handler

    if not dist.is_available() or hasattr(dist.Backend, "MPISTRAT"):
        return
    dist.Backend.register_backend("mpistrat", _create_group, extended_api=True, devices=["cpu"])
    register_rendezvous_handler("mpi", _rendezvous)


register = autoload


def _create_group(opts: object, pg_options: object) -> object:
    from mpistrat.torch.process_group import create_group

    return create_group(opts, pg_options)


def _rendezvous(url: str, **kwargs: object) -> object:
    from mpistrat.torch.launching import rendezvous

    return rendezvous(url, **kwargs)
