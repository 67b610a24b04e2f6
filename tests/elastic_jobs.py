"""An elastic job whose calls are undone and repeated, without the death of a rank."""

import pytest
from mpi4py import MPI

from mpistrat.elastic import job as elastic_job
from mpistrat.elastic.job import ElasticJob
from mpistrat.failures.process_state import process
from mpistrat.system import units


class Job(ElasticJob):
    """A job that repeats the units in `repeated`, and all ranks of which survive."""

    def __init__(self):
        super().__init__()
        self.repeated = lambda number: False
        self.done = set()
        self.generations = 0

    def _agree(self, is_well):
        is_well = bool(self._comm.allreduce(int(is_well), MPI.MIN))
        if self._num_units in self.done or not self.repeated(self._num_units):
            return is_well
        self.done.add(self._num_units)
        return False

    def _revoke(self):
        """Leave the channel of all ranks as it is: other tests use it."""

    def _without_lost(self):
        self.generations += 1
        return self._comm.Split(0, -self._comm.rank)


@pytest.fixture
def job(monkeypatch):
    fresh = Job()
    monkeypatch.setattr(elastic_job, "job", fresh)
    monkeypatch.setattr(elastic_job, "why_not_tolerant", lambda: "")
    monkeypatch.setattr(units, "_note", None)
    monkeypatch.setattr(process, "outlives_losses", False)
    monkeypatch.setattr(process, "when_all_have_ended", bool)
    return fresh
