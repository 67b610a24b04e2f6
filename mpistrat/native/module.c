/* The Python module mpistrat._native. mpistrat/native/__init__.py says who uses it. */

#define MPISTRAT_MODULE
#include "native.h"

#define FAST(NAME, FUNCTION) {NAME, (PyCFunction)(void (*)(void))FUNCTION, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    FAST("round_start", mpistrat_call_round_start),
    FAST("round_done", mpistrat_call_round_done),
    FAST("round_meet", mpistrat_call_round_meet),
    FAST("round_rest", mpistrat_call_round_rest),
    FAST("round_expect", mpistrat_call_round_expect),
    FAST("round_contribute", mpistrat_call_round_contribute),
    FAST("round_result", mpistrat_call_round_result),
    FAST("combine_rows", mpistrat_call_combine_rows),
    FAST("reduce_contribute", mpistrat_call_reduce_contribute),
    FAST("reduce_withdraw", mpistrat_call_reduce_withdraw),
    FAST("reduce", mpistrat_call_reduce),
    FAST("contribute_slices", mpistrat_call_contribute_slices),
    FAST("reduce_slice", mpistrat_call_reduce_slice),
    FAST("collect_slices", mpistrat_call_collect_slices),
    FAST("reduce_part", mpistrat_call_reduce_part),
    FAST("collect_parts", mpistrat_call_collect_parts),
    FAST("join", mpistrat_join),
    FAST("split", mpistrat_split),
    FAST("array_at", mpistrat_array_at),
    FAST("copy_rows", mpistrat_copy_rows),
    FAST("begin_copy", mpistrat_begin_copy),
    FAST("end_copy", mpistrat_end_copy),
    FAST("count_rows", mpistrat_count_rows),
    FAST("decode_chunks", mpistrat_decode_chunks),
    FAST("ask_for", mpistrat_ask_for),
    FAST("map_file", mpistrat_map_file),
    FAST("transpose_bytes", mpistrat_transpose_bytes),
    FAST("make_turn", mpistrat_make_turn),
    FAST("hand_over", mpistrat_hand_over),
    FAST("park", mpistrat_park),
    FAST("has_taken", mpistrat_has_taken),
    FAST("end_within", mpistrat_end_within),
    FAST("leave_at_exit", mpistrat_leave_at_exit),
    {"describe", mpistrat_describe, METH_O, NULL},
    {"address", mpistrat_address, METH_O, NULL},
    {"addresses", mpistrat_addresses, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "mpistrat._native", NULL, -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    import_array();
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddStringConstant(module, "DIGEST", MPISTRAT_DIGEST) < 0)
        Py_CLEAR(module);
    PyObject *type = module == NULL ? NULL : mpistrat_fast_reduction_type();
    if (module != NULL && (type == NULL || PyModule_AddObject(module, "FastReduction", type) < 0)) {
        Py_XDECREF(type);
        Py_CLEAR(module);
    }
    return module;
}
