def get_tp_group():
    raise AssertionError("tensor model parallel group is not initialized")
