/* Functions of MPI that the recorder replaces: name, number of arguments, class, and the positions
   of the arguments that it reads (-1: there is none).

   X(name, arguments, class, comm, peer, tag, count, type, request, made). `comm` is also a window or
   a file, `peer` a root, `made` the new communicator, the flag of a poll, or the group. For SENDRECV,
   `count` and `type` are source and tag of the message to receive; for requests, `count` is their
   number and `type` the indices; where the handle itself is passed by address, `made` is 0. Those of LARGE_... have a
   variant for large counts, too. Those of MPI_4 are not in older libraries. PERSISTENT requests wait
   for nothing before they are started; of a partitioned send, `count` is its number of partitions. */

#define LARGE_FUNCTIONS(X) \
    X(Send, 6, SEND, 5, 3, 4, -1, -1, -1, -1) \
    X(Bsend, 6, SEND, 5, 3, 4, -1, -1, -1, -1) \
    X(Ssend, 6, SEND, 5, 3, 4, -1, -1, -1, -1) \
    X(Rsend, 6, SEND, 5, 3, 4, -1, -1, -1, -1) \
    X(Recv, 7, RECV, 5, 3, 4, -1, -1, -1, -1) \
    X(Sendrecv, 12, SENDRECV, 10, 3, 4, 8, 9, -1, -1) \
    X(Sendrecv_replace, 9, SENDRECV, 7, 3, 4, 5, 6, -1, -1) \
    X(Mrecv, 5, LOCAL, -1, -1, -1, -1, -1, -1, -1) \
    X(File_read_shared, 5, LOCAL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_write_shared, 5, LOCAL, 0, -1, -1, -1, -1, -1, -1) \
    X(Isend, 7, ISEND, 5, 3, 4, -1, -1, 6, -1) \
    X(Issend, 7, ISEND, 5, 3, 4, -1, -1, 6, -1) \
    X(Irsend, 7, ISEND, 5, 3, 4, -1, -1, 6, -1) \
    X(Ibsend, 7, ISEND, 5, 3, 4, -1, -1, 6, -1) \
    X(Send_init, 7, ISEND, 5, 3, 4, -1, -1, 6, PERSISTENT) \
    X(Ssend_init, 7, ISEND, 5, 3, 4, -1, -1, 6, PERSISTENT) \
    X(Rsend_init, 7, ISEND, 5, 3, 4, -1, -1, 6, PERSISTENT) \
    X(Bsend_init, 7, ISEND, 5, 3, 4, -1, -1, 6, PERSISTENT) \
    X(Irecv, 7, IRECV, 5, 3, 4, -1, -1, 6, -1) \
    X(Recv_init, 7, IRECV, 5, 3, 4, -1, -1, 6, PERSISTENT) \
    X(Imrecv, 5, IOTHER, -1, -1, -1, -1, -1, 4, -1) \
    X(Bcast, 5, COLL, 4, 3, -1, 1, 2, -1, -1) \
    X(Gather, 8, COLL, 7, 6, -1, -1, -1, -1, -1) \
    X(Gatherv, 9, COLL, 8, 7, -1, -1, -1, -1, -1) \
    X(Scatter, 8, COLL, 7, 6, -1, -1, -1, -1, -1) \
    X(Scatterv, 9, COLL, 8, 7, -1, -1, -1, -1, -1) \
    X(Allgather, 7, COLL, 6, -1, -1, 4, 5, -1, -1) \
    X(Allgatherv, 8, COLL, 7, -1, -1, -1, -1, -1, -1) \
    X(Alltoall, 7, COLL, 6, -1, -1, 4, 5, -1, -1) \
    X(Alltoallv, 9, COLL, 8, -1, -1, -1, -1, -1, -1) \
    X(Alltoallw, 9, COLL, 8, -1, -1, -1, -1, -1, -1) \
    X(Reduce, 7, COLL, 6, 5, -1, 2, 3, -1, -1) \
    X(Allreduce, 6, COLL, 5, -1, -1, 2, 3, -1, -1) \
    X(Reduce_scatter, 6, COLL, 5, -1, -1, -1, -1, -1, -1) \
    X(Reduce_scatter_block, 6, COLL, 5, -1, -1, 2, 3, -1, -1) \
    X(Scan, 6, COLL, 5, -1, -1, 2, 3, -1, -1) \
    X(Exscan, 6, COLL, 5, -1, -1, 2, 3, -1, -1) \
    X(Neighbor_allgather, 7, COLL, 6, -1, -1, -1, -1, -1, -1) \
    X(Neighbor_allgatherv, 8, COLL, 7, -1, -1, -1, -1, -1, -1) \
    X(Neighbor_alltoall, 7, COLL, 6, -1, -1, -1, -1, -1, -1) \
    X(Neighbor_alltoallv, 9, COLL, 8, -1, -1, -1, -1, -1, -1) \
    X(Neighbor_alltoallw, 9, COLL, 8, -1, -1, -1, -1, -1, -1) \
    X(Ibcast, 6, ICOLL, 4, 3, -1, 1, 2, 5, -1) \
    X(Igather, 9, ICOLL, 7, 6, -1, -1, -1, 8, -1) \
    X(Igatherv, 10, ICOLL, 8, 7, -1, -1, -1, 9, -1) \
    X(Iscatter, 9, ICOLL, 7, 6, -1, -1, -1, 8, -1) \
    X(Iscatterv, 10, ICOLL, 8, 7, -1, -1, -1, 9, -1) \
    X(Iallgather, 8, ICOLL, 6, -1, -1, -1, -1, 7, -1) \
    X(Iallgatherv, 9, ICOLL, 7, -1, -1, -1, -1, 8, -1) \
    X(Ialltoall, 8, ICOLL, 6, -1, -1, -1, -1, 7, -1) \
    X(Ialltoallv, 10, ICOLL, 8, -1, -1, -1, -1, 9, -1) \
    X(Ialltoallw, 10, ICOLL, 8, -1, -1, -1, -1, 9, -1) \
    X(Ireduce, 8, ICOLL, 6, 5, -1, 2, 3, 7, -1) \
    X(Iallreduce, 7, ICOLL, 5, -1, -1, 2, 3, 6, -1) \
    X(Ireduce_scatter, 7, ICOLL, 5, -1, -1, -1, -1, 6, -1) \
    X(Ireduce_scatter_block, 7, ICOLL, 5, -1, -1, -1, -1, 6, -1) \
    X(Iscan, 7, ICOLL, 5, -1, -1, -1, -1, 6, -1) \
    X(Iexscan, 7, ICOLL, 5, -1, -1, -1, -1, 6, -1) \
    X(Win_create, 6, WINMAKE, 4, -1, -1, -1, -1, -1, 5) \
    X(Win_allocate, 6, WINMAKE, 3, -1, -1, -1, -1, -1, 5) \
    X(Win_allocate_shared, 6, WINMAKE, 3, -1, -1, -1, -1, -1, 5) \
    X(File_read_all, 5, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_write_all, 5, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_read_at_all, 6, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_write_at_all, 6, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_read_ordered, 5, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_write_ordered, 5, FILECOLL, 0, -1, -1, -1, -1, -1, -1)

#define OTHER_FUNCTIONS(X) \
    X(Probe, 4, RECV, 2, 0, 1, -1, -1, -1, -1) \
    X(Mprobe, 5, RECV, 2, 0, 1, -1, -1, -1, -1) \
    X(Iprobe, 5, POLL, 2, 0, 1, -1, -1, -1, 3) \
    X(Improbe, 6, POLL, 2, 0, 1, -1, -1, -1, 3) \
    X(Test, 3, POLL, -1, -1, -1, -1, -1, 0, 1) \
    X(Testall, 4, POLL, -1, -1, -1, 0, -1, 1, 2) \
    X(Testany, 5, POLL, -1, -1, -1, 0, 2, 1, 3) \
    X(Testsome, 5, POLL, -1, -1, -1, 0, 3, 1, 2) \
    X(Request_get_status, 3, POLL, -1, -1, -1, -1, -1, -1, 1) \
    X(Win_test, 2, POLL, 0, -1, -1, -1, -1, -1, 1) \
    X(Wait, 2, WAIT, -1, -1, -1, -1, -1, 0, -1) \
    X(Waitall, 3, WAIT, -1, -1, -1, 0, -1, 1, -1) \
    X(Waitany, 4, WAIT, -1, -1, -1, 0, 2, 1, -1) \
    X(Waitsome, 5, WAIT, -1, -1, -1, 0, 3, 1, 2) \
    X(Start, 1, START, -1, -1, -1, -1, -1, 0, -1) \
    X(Startall, 2, START, -1, -1, -1, 0, -1, 1, -1) \
    X(Request_free, 1, FORGET, -1, -1, -1, -1, -1, 0, -1) \
    X(Barrier, 1, COLL, 0, -1, -1, -1, -1, -1, -1) \
    X(Ibarrier, 2, ICOLL, 0, -1, -1, -1, -1, 1, -1) \
    X(Comm_idup, 3, ICOLL, 0, -1, -1, -1, -1, 2, 1) \
    X(Comm_dup, 2, MAKE, 0, -1, -1, -1, -1, -1, 1) \
    X(Comm_dup_with_info, 3, MAKE, 0, -1, -1, -1, -1, -1, 2) \
    X(Comm_split, 4, MAKE, 0, -1, -1, -1, -1, -1, 3) \
    X(Comm_split_type, 5, MAKE, 0, -1, -1, -1, -1, -1, 4) \
    X(Comm_create, 3, MAKE, 0, -1, -1, -1, -1, -1, 2) \
    X(Cart_create, 6, MAKE, 0, -1, -1, -1, -1, -1, 5) \
    X(Cart_sub, 3, MAKE, 0, -1, -1, -1, -1, -1, 2) \
    X(Graph_create, 6, MAKE, 0, -1, -1, -1, -1, -1, 5) \
    X(Dist_graph_create, 9, MAKE, 0, -1, -1, -1, -1, -1, 8) \
    X(Dist_graph_create_adjacent, 10, MAKE, 0, -1, -1, -1, -1, -1, 9) \
    X(Intercomm_merge, 3, MAKE, 0, -1, -1, -1, -1, -1, 2) \
    X(Comm_create_group, 4, MAKEGROUP, 0, -1, 2, -1, -1, -1, 3) \
    X(Intercomm_create, 6, MAKEGROUP, 0, -1, 4, -1, -1, -1, 5) \
    X(Comm_free, 1, FREE, 0, -1, -1, -1, -1, -1, 0) \
    X(Comm_disconnect, 1, FREE, 0, -1, -1, -1, -1, -1, 0) \
    X(Comm_spawn, 8, OUTSIDE, 5, 4, -1, -1, -1, -1, -1) \
    X(Comm_spawn_multiple, 9, OUTSIDE, 6, 5, -1, -1, -1, -1, -1) \
    X(Comm_accept, 5, OUTSIDE, 3, 2, -1, -1, -1, -1, 4) \
    X(Comm_connect, 5, OUTSIDE, 3, 2, -1, -1, -1, -1, 4) \
    X(Win_create_dynamic, 3, WINMAKE, 1, -1, -1, -1, -1, -1, 2) \
    X(Win_free, 1, WINCOLL, 0, -1, -1, -1, -1, -1, 0) \
    X(Win_fence, 2, WINCOLL, 1, -1, -1, -1, -1, -1, -1) \
    X(Win_start, 3, WINGROUP, 2, -1, -1, -1, -1, -1, 0) \
    X(Win_post, 3, WINGROUP, 2, -1, -1, -1, -1, -1, 0) \
    X(Win_complete, 1, WINANY, 0, -1, -1, -1, -1, -1, -1) \
    X(Win_wait, 1, WINANY, 0, -1, -1, -1, -1, -1, -1) \
    X(Win_lock, 4, WINANY, 3, 1, -1, -1, -1, -1, -1) \
    X(Win_lock_all, 2, WINANY, 1, -1, -1, -1, -1, -1, -1) \
    X(Win_unlock, 2, WINANY, 1, 0, -1, -1, -1, -1, -1) \
    X(Win_unlock_all, 1, WINANY, 0, -1, -1, -1, -1, -1, -1) \
    X(Win_flush, 2, WINANY, 1, 0, -1, -1, -1, -1, -1) \
    X(Win_flush_all, 1, WINANY, 0, -1, -1, -1, -1, -1, -1) \
    X(File_open, 5, FILEMAKE, 0, -1, -1, -1, -1, -1, 4) \
    X(File_close, 1, FILECOLL, 0, -1, -1, -1, -1, -1, 0) \
    X(File_set_view, 6, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_set_size, 2, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_preallocate, 2, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_sync, 1, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_read_all_end, 3, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_write_all_end, 3, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_read_at_all_end, 3, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_write_at_all_end, 3, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_set_atomicity, 2, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(File_seek_shared, 3, FILECOLL, 0, -1, -1, -1, -1, -1, -1) \
    X(Abort, 2, ABORT, 0, -1, -1, -1, -1, -1, -1)

#define LARGE_MPI_4_FUNCTIONS(X) \
    X(Bcast_init, 7, ICOLL, 4, 3, -1, 1, 2, 6, PERSISTENT) \
    X(Gather_init, 10, ICOLL, 7, 6, -1, -1, -1, 9, PERSISTENT) \
    X(Gatherv_init, 11, ICOLL, 8, 7, -1, -1, -1, 10, PERSISTENT) \
    X(Scatter_init, 10, ICOLL, 7, 6, -1, -1, -1, 9, PERSISTENT) \
    X(Scatterv_init, 11, ICOLL, 8, 7, -1, -1, -1, 10, PERSISTENT) \
    X(Allgather_init, 9, ICOLL, 6, -1, -1, 4, 5, 8, PERSISTENT) \
    X(Allgatherv_init, 10, ICOLL, 7, -1, -1, -1, -1, 9, PERSISTENT) \
    X(Alltoall_init, 9, ICOLL, 6, -1, -1, 4, 5, 8, PERSISTENT) \
    X(Alltoallv_init, 11, ICOLL, 8, -1, -1, -1, -1, 10, PERSISTENT) \
    X(Alltoallw_init, 11, ICOLL, 8, -1, -1, -1, -1, 10, PERSISTENT) \
    X(Reduce_init, 9, ICOLL, 6, 5, -1, 2, 3, 8, PERSISTENT) \
    X(Allreduce_init, 8, ICOLL, 5, -1, -1, 2, 3, 7, PERSISTENT) \
    X(Reduce_scatter_init, 8, ICOLL, 5, -1, -1, -1, -1, 7, PERSISTENT) \
    X(Reduce_scatter_block_init, 8, ICOLL, 5, -1, -1, 2, 3, 7, PERSISTENT) \
    X(Scan_init, 8, ICOLL, 5, -1, -1, 2, 3, 7, PERSISTENT) \
    X(Exscan_init, 8, ICOLL, 5, -1, -1, 2, 3, 7, PERSISTENT) \
    X(Neighbor_allgather_init, 9, ICOLL, 6, -1, -1, -1, -1, 8, PERSISTENT) \
    X(Neighbor_allgatherv_init, 10, ICOLL, 7, -1, -1, -1, -1, 9, PERSISTENT) \
    X(Neighbor_alltoall_init, 9, ICOLL, 6, -1, -1, -1, -1, 8, PERSISTENT) \
    X(Neighbor_alltoallv_init, 11, ICOLL, 8, -1, -1, -1, -1, 10, PERSISTENT) \
    X(Neighbor_alltoallw_init, 11, ICOLL, 8, -1, -1, -1, -1, 10, PERSISTENT)

#define OTHER_MPI_4_FUNCTIONS(X) \
    X(Barrier_init, 3, ICOLL, 0, -1, -1, -1, -1, 2, PERSISTENT) \
    X(Psend_init, 9, ISEND, 6, 4, 5, 1, -1, 8, PERSISTENT) \
    X(Precv_init, 9, IRECV, 6, 4, 5, -1, -1, 8, PERSISTENT) \
    X(Pready, 2, READY, -1, -1, -1, -1, -1, 1, -1) \
    X(Pready_range, 3, READY, -1, -1, -1, -1, -1, 2, -1) \
    X(Pready_list, 3, READY, -1, -1, -1, -1, 1, 2, -1) \
    X(Parrived, 3, POLL, -1, -1, -1, -1, -1, -1, 2)
