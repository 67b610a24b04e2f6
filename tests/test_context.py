import copy
import threading

import pytest

import mpistrat as ms


def test_default_context():
    assert not ms.has_strategy()
    assert not ms.in_cross_replica_context()
    assert ms.get_strategy() is ms.get_strategy()
    replica = ms.get_replica_context()
    assert replica.strategy is ms.get_strategy()
    assert replica.num_replicas_in_sync == 1
    assert replica.replica_id_in_sync_group == 0


def test_scope_is_entered_again_and_left_on_every_way(strategy):
    with pytest.raises(KeyError), strategy.scope() as inside:
        assert inside is strategy
        assert ms.get_strategy() is strategy
        assert ms.in_cross_replica_context()
        assert ms.get_replica_context() is None
        with strategy.scope():
            assert ms.get_strategy() is strategy
        assert ms.get_strategy() is strategy
        raise KeyError
    assert not ms.has_strategy()


def test_a_scope_object_is_entered_again(strategy):
    scope = strategy.scope()
    for _ in range(2):
        with scope as inside:
            assert inside is strategy
            assert ms.in_cross_replica_context()
        assert not ms.has_strategy()


def test_a_scope_object_is_entered_inside_itself(strategy):
    scope = strategy.scope()
    with scope:
        with pytest.raises(KeyError), scope:
            raise KeyError
        assert ms.get_strategy() is strategy
    assert not ms.has_strategy()
    with pytest.raises(ms.errors.ContextError, match="merge_call"):
        strategy.run(scope.__enter__)
    assert not ms.has_strategy()


def test_threads_share_a_scope_object(strategy):
    scope, seen = strategy.scope(), []

    def enter():
        with scope:
            seen.append(ms.get_strategy())
        seen.append(ms.has_strategy())

    with scope:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert seen == [strategy, False]
        assert ms.get_strategy() is strategy


def test_a_scope_decorates_a_function(strategy):
    @strategy.scope()
    def build():
        return ms.get_strategy()

    assert build() is build() is strategy
    assert not ms.has_strategy()


def test_another_strategy_inside_a_scope_is_refused(strategy):
    other = ms.OneDeviceStrategy()
    with strategy.scope():
        with pytest.raises(ms.errors.ContextError, match="OneDeviceStrategy.*MPIStrategy"):
            other.scope().__enter__()
        with pytest.raises(ms.errors.ContextError, match="mixed"):
            other.run(lambda: 1)
        assert ms.get_strategy() is strategy


def test_replica_context_inside_run(strategy, rank, size):
    def fn():
        replica = ms.get_replica_context()
        assert replica.replica_id_in_sync_group == rank
        assert replica.num_replicas_in_sync == size
        assert replica.strategy is strategy
        assert ms.get_strategy() is strategy
        assert not ms.in_cross_replica_context()
        return replica

    kept = strategy.run(fn)
    with pytest.raises(ms.errors.ContextError, match=r"strategy\.run"):
        kept.all_reduce("sum", 1)
    with pytest.raises(ms.errors.ContextError):
        _ = kept.replica_id_in_sync_group


def test_merge_call_switches_contexts_and_back(strategy, rank):
    def merge_fn(strategy_given, per_replica, text, *, factor):
        assert strategy_given is strategy
        assert ms.in_cross_replica_context()
        assert ms.get_replica_context() is None
        assert isinstance(per_replica["x"], ms.PerReplica)
        assert isinstance(factor, ms.PerReplica)
        assert text == "text"
        with pytest.raises(ms.errors.ContextError):
            outer.all_reduce("sum", 1)
        assert strategy.run(lambda: 5).values == (5,)
        return {"mirrored": ms.Mirrored(7), "mine": per_replica["x"], "plain": None}

    def fn():
        nonlocal outer
        outer = ms.get_replica_context()
        merged = outer.merge_call(merge_fn, args=({"x": rank}, "text"), kwargs={"factor": 2})
        assert ms.get_replica_context() is outer
        assert merged == {"mirrored": 7, "mine": rank, "plain": None}

    outer = None
    strategy.run(fn)


def test_an_exception_on_all_ranks_restores_contexts_and_keeps_the_strategy(strategy, size):
    def bad_merge(strategy):
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        strategy.run(lambda: ms.get_replica_context().merge_call(bad_merge))
    assert not ms.has_strategy()
    assert strategy.reduce("sum", 1) == size


def test_a_new_thread_starts_in_the_default_context(strategy):
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(ms.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_set_strategy_rules_until_it_is_taken_back(strategy):
    ms.experimental_set_strategy(strategy)
    try:
        assert ms.get_strategy() is strategy
        assert ms.in_cross_replica_context()
        with strategy.scope(), pytest.raises(ms.errors.ContextError, match="outside"):
            ms.experimental_set_strategy(None)
    finally:
        ms.experimental_set_strategy(None)
    assert not ms.has_strategy()


def test_default_strategy_is_a_singleton_that_wraps_nothing():
    default = ms.get_strategy()
    assert default.run(lambda x: x + 1, args=(1,)) == 2
    assert default.reduce("sum", 3) == 3
    assert default.reduce("mean", [1.0, 3.0], axis=None) == [1.0, 3.0]
    assert default.experimental_local_results([1, 2]) == ([1, 2],)
    with pytest.raises(RuntimeError, match="one default strategy"):
        type(default)()
    with pytest.raises(RuntimeError):
        copy.deepcopy(default)
    with pytest.raises(RuntimeError):
        _ = default.extended.worker_devices


def test_copies(strategy, size):
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.copy(strategy)
    twin = copy.deepcopy(strategy)
    assert twin is not strategy
    assert twin.extended is not strategy.extended
    with strategy.scope(), pytest.raises(ms.errors.ContextError):
        twin.scope().__enter__()
    assert twin.reduce("sum", 1) == size


def test_cluster_resolver_and_flags(strategy, rank, size):
    resolver = strategy.cluster_resolver
    assert (resolver.task_type, resolver.task_id, resolver.num_workers) == ("worker", rank, size)
    assert 0 <= resolver.local_rank <= rank
    assert len(resolver.hosts) >= 1
    assert strategy.extended.should_checkpoint is (rank == 0)
    assert strategy.extended.should_save_summary is (rank == 0)
    assert len(strategy.extended.worker_devices) == size
    assert str(rank) in repr(strategy)
    assert ms.OneDeviceStrategy().cluster_resolver.num_workers == 1
    assert ms.get_strategy().cluster_resolver is None


def test_a_replica_context_of_another_strategy_is_refused(strategy, size):
    other = ms.OneDeviceStrategy()
    with strategy.scope(), pytest.raises(ms.errors.ContextError, match="mixed"):
        ms.ReplicaContext(other).__enter__()
    with strategy.scope(), ms.ReplicaContext(strategy) as replica:
        assert ms.get_replica_context() is replica
        assert replica.all_reduce("sum", 1) == size
