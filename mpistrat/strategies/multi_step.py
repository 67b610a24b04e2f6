"""What a function given to `experimental_run_steps_on_iterator` leaves behind."""

from __future__ import annotations

from typing import Any

from mpistrat import context
from mpistrat.errors import ContextError
from mpistrat.options import ReduceOp

__all__ = ["MultiStepContext"]


class MultiStepContext:
    """Outputs of the last of several steps.

    Parameters
    ----------
    strategy : Strategy
        Whose steps they are.
    initial_outputs : dict, optional
        Outputs before the first step, by name.
    """

    def __init__(self, strategy: Any, initial_outputs: dict[str, Any] | None = None) -> None:
        self._strategy = strategy
        self._last_step_outputs = dict(initial_outputs or {})
        self._non_tensor_outputs: dict[str, Any] = {}

    @property
    def last_step_outputs(self) -> dict[str, Any]:
        """What `set_last_step_output` was given in the last step, by name. Local."""
        return self._last_step_outputs

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """What `set_non_tensor_output` was given, by name. Local."""
        return self._non_tensor_outputs

    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Keep `output` as that of this step.

        **Collective** where `reduce_op` is given, else local.

        Parameters
        ----------
        name : str
        output : nest
        reduce_op : ReduceOp or str, optional
            How to reduce `output` over replicas. ``None`` keeps it as it is.

        Raises
        ------
        ContextError
            In replica context without `reduce_op`: the replicas' outputs would differ.
        """
        frame = context.current()
        if frame is None or frame.kind is not context.Kind.REPLICA:
            if reduce_op is not None:
                output = self._strategy.reduce(reduce_op, output)
            self._last_step_outputs[name] = output
            return
        if reduce_op is None:
            raise ContextError(
                f"set_last_step_output({name!r}) inside strategy.run needs a reduce_op, because "
                "each replica has an output of its own. Give one, or call it in cross-replica "
                "context."
            )
        frame.replica_context.merge_call(
            lambda strategy, value: self.set_last_step_output(name, value, reduce_op), (output,)
        )

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Keep `output`, any object, as it is. Local."""
        self._non_tensor_outputs[name] = output
