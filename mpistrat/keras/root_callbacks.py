"""`on_root`: callbacks that write files do it on rank 0 only."""

from __future__ import annotations

from typing import Any

import keras

from mpistrat.keras.ranks import rank_and_size
from mpistrat.keras.replicas import Replicas

_REFUSED: dict[type, str] = {
    keras.callbacks.EarlyStopping: "stops the training",
    keras.callbacks.TerminateOnNaN: "stops the training",
    keras.callbacks.ReduceLROnPlateau: "changes the learning rate",
    keras.callbacks.LearningRateScheduler: "changes the learning rate",
    keras.callbacks.SwapEMAWeights: "changes the weights",
    keras.callbacks.BackupAndRestore: "changes the weights, and the epoch at which fit continues",
    Replicas: "exchanges values between all ranks",
}
_INSTEAD: dict[type, str] = {
    keras.callbacks.BackupAndRestore: "Use mpistrat.keras.HDF5Checkpoint in its place."
}


def on_root(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Return a callback that calls `callback` on rank 0 only. Local.

    For callbacks that write or print, such as ``ModelCheckpoint``, ``CSVLogger`` and
    ``TensorBoard``: otherwise all ranks would write the same file. `callback` gets the model and
    the parameters on every rank; its other methods are called on rank 0.

    Parameters
    ----------
    callback : keras.callbacks.Callback
        A callback that neither changes the model nor stops the training.

    Returns
    -------
    keras.callbacks.Callback
        The callback to pass to ``fit`` on every rank. It has the attributes of `callback`.

    Raises
    ------
    TypeError
        If `callback` is not a callback.
    ValueError
        If `callback` must run on every rank, because it changes the model or stops the training.
    RuntimeError
        During the training, if `callback` has stopped it on rank 0.

    Examples
    --------
    >>> csv = mk.on_root(keras.callbacks.CSVLogger("log.csv"))
    """
    if not isinstance(callback, keras.callbacks.Callback):
        raise TypeError(f"on_root expected a keras.callbacks.Callback, not {callback!r}.")
    for kind, reason in _REFUSED.items():
        if isinstance(callback, kind):
            name = type(callback).__name__
            remedy = _INSTEAD.get(kind, f"Pass {name} itself to fit, on every rank.")
            raise ValueError(
                f"on_root cannot take {name}, because it {reason}, which must happen on all ranks: "
                f"if only rank 0 did it, the ranks would no longer be one model. {remedy}"
            )
    return _OnRoot(callback)


class _OnRoot(keras.callbacks.Callback):
    """Passes the calls of all hooks on to one callback, on rank 0."""

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        self._callback = callback

    def set_params(self, params: Any) -> None:
        """Pass the parameters on, on every rank."""
        super().set_params(params)
        self._callback.set_params(params)

    def set_model(self, model: Any) -> None:
        """Pass the model on, on every rank."""
        super().set_model(model)
        self._callback.set_model(model)

    def __getattr__(self, name: str) -> Any:
        if name == "_callback":  # not set yet
            raise AttributeError(name)
        return getattr(self._callback, name)

    def _pass_on(self, hook: str, *arguments: Any, **named: Any) -> None:
        rank, _ = rank_and_size()
        if rank:
            return
        was_stopping = getattr(self.model, "stop_training", False)
        getattr(self._callback, hook)(*arguments, **named)
        if getattr(self.model, "stop_training", False) and not was_stopping:
            raise RuntimeError(
                f"{type(self._callback).__name__} has stopped the training in {hook}, but it runs "
                "on rank 0 only, so the other ranks would continue. Pass it to fit without "
                "on_root."
            )


def _hook(name: str) -> Any:
    def call(self: _OnRoot, *arguments: Any, **named: Any) -> None:
        self._pass_on(name, *arguments, **named)

    call.__name__, call.__doc__ = name, "Call the hook on rank 0."
    return call


for _name in dir(keras.callbacks.Callback):
    if _name.startswith("on_"):
        setattr(_OnRoot, _name, _hook(_name))
