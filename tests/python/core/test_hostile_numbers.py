"""Numbers and vectors that no caller should pass, passed to every operator and method that takes them."""

import re

# The signed number with the lowest value, sizes that no memory has, and some that overflow a product.
HOSTILE = (-1, -(1 << 63), (1 << 63) - 1, 1 << 62, 1 << 31)

# Calls with a hostile number `n`, which each of them refuses.
REFUSED = {
    "Checkpoint.load_into": "file.load_into(['x'], [key.clone()], ([n, 0], [n, 1], [1, 1]))",
    "Checkpoint.load rules": "file.load(['y'], ([n, 0, 0], [1, n, 1], [1, 1, 1]), rules=['y = x'])",
    "Checkpoint.load_into rules": "file.load_into(['y'], [key.clone()], ([n], [1], [1]), rules=['y = x'])",
    "Checkpoint.load_region count": "file.load_region('x', [n] * 5)",
    "Checkpoint.load_region length": "file.load_region('x', [0, n, 1, 0, 1, 1])",
    "Checkpoint.load_region start": "file.load_region('x', [n, 1, 1, 0, 1, 1])",
    "Checkpoint.load_region step": "file.load_region('x', [0, 2, n, 0, 1, 1])",
    "Checkpoint.load dims": "file.load(['x'], ([n], [1], []), dims=[0])",
    "Checkpoint.load dims of an output": "file.load(['y'], ([0], [1], []), dims=[n], rules=['y = x'])",
    "Checkpoint.stream regions": "file.stream(['x'], ([n, 0], [n, 1], [1, n])).next()",
    "Checkpoint.load_views_into": "views(f'[0, {n}, [1], [1]]')",
    "Checkpoint.load_views_into sizes": "views(f'[0, 0, [{n}], [{n}]]')",
    "EncryptionKey.derived memory": "classes.EncryptionKey(key, '', [1, n], key[:16].clone())",
    "EncryptionKey.derived passes": "classes.EncryptionKey(key, '', [n, 8192], key[:16].clone())",
    "EncryptionKey.derive memory": "classes.EncryptionKey.derive(key, [1, n], key[:16].clone(), key.clone())",
    "EncryptionKey.derive passes": "classes.EncryptionKey.derive(key, [n, 8192], key[:16].clone(), key.clone())",
    "EncryptionKey.passphrase memory": "classes.EncryptionKey(key, '', [1, n])",
    "EncryptionKey.passphrase passes": "classes.EncryptionKey(key, '', [n, 1 << 20])",
    "RanksLoad rank": "classes.RanksLoad(plan(), n, [key.clone()], cpu)",
    "RanksLoad.read": "classes.RanksLoad(plan(), 0, [key.clone()], cpu).read(n, key[:0].clone())",
    "RanksLoad.unpack": "classes.RanksLoad(plan(), 0, [key.clone()], cpu).unpack(n, key[:0].clone())",
    "LoadPlan count": "plan(lists=[n])",
    "LoadPlan.cached_items": "plan().call('cached_items', str(n))",
    "LoadPlan.load_own item": "plan().load_own(0, [n], cpu, None)",
    "LoadPlan.load_own rank": "plan().load_own(n, [0], cpu, None)",
    "LoadPlan.load_own_into item": "plan().load_own_into(0, [n], [key.clone()])",
    "LoadPlan.load_own_into rank": "plan().load_own_into(n, [0], [key.clone()])",
    "LoadPlan.part_to_verify": "plan().call('part_to_verify', str(n))",
    "LoadPlan.reads": "plan().call('reads', f'[{n}, {n}]')",
    "LoadPlan.sent_bytes": "plan().call('sent_bytes', str(n))",
    "LoadPlan.traffic rank": "plan().call('traffic', f'[{n}, 0]')",
    "LoadPlan.traffic window": "plan().call('traffic', f'[0, {n}]')",
    "RanksSave rank": "classes.RanksSave(saves(), n, ['new'], [''], [key])",
    "SavePlan ranks": "saves(ranks=n)",
    "SavePlan.traffic rank": "saves().call('traffic', f'[{n}, 0]')",
    "SavePlan.traffic window": "saves().call('traffic', f'[0, {n}]')",
    "SavePlan.used_elements": "saves().call('used_elements', str(n))",
    "Source.read": "classes.Source('a').read(n, key.clone())",
    "Update.write begin": "update().write(n, 1)",
    "Update.write end": "update().write(0, n)",
    "Writer.write kind": "classes.Writer('new', None, True).write('x', key, (n, 0))",
    "Writer.write module": "classes.Writer('new', None, True).write('x', key, (0, n))",
    "_wait_for_event": "ops._wait_for_event(n, 'cuda:0')",
    "dtypes": "ops.load_files(['a'], 'cpu', patterns=['*'], dtypes=[n if n != -1 else -2])",
    "load_boxes count": "ops.load_boxes(['b'], ['x'], [n], [n], [n])",
    "load_boxes length": "ops.load_boxes(['b'], ['x'], [0, 0], [n, 1], [1, 1])",
    "load_boxes lists": "ops.load_boxes(['b'], ['x'], [0, 0], [1, 1], [n] * 3)",
    "load_boxes start": "ops.load_boxes(['b'], ['x'], [n, 0], [1, 1], [1, 1])",
    "load_boxes step": "ops.load_boxes(['b'], ['x'], [0, 0], [2, 1], [n, 1])",
    "load_recipe": "ops.load_recipe(['b'], ['y'], [f'y = view(x, {n}, {n})'])",
    "load_slices dimension": "ops.load_slices(['b'], ['x'], [n if n != -1 else -3], [0], [1])",
    "load_slices end": "ops.load_slices(['b'], ['x'], [0], [n], [n])",
    "load_slices length": "ops.load_slices(['b'], ['x'], [0], [0], [n])",
    "load_slices lists": "ops.load_slices(['b'], ['x'], [0], [n, n], [1])",
    "load_slices start": "ops.load_slices(['b'], ['x'], [0], [n], [1])",
    "profile_stop": "ops.profile_stop(n)",
    "scatter dtype": "ops.scatter(key, [0], [n], [4], [1])",
    "scatter lists": "ops.scatter(key, [n, n], [0], [4], [1])",
    "scatter offset": "ops.scatter(key, [n], [0], [4], [1])",
    "scatter rank": "ops.scatter(key, [0], [0], [4], [n])",
    "scatter size": "ops.scatter(key, [0], [0], [n], [1])",
    "scatter sizes": "ops.scatter(key, [0], [0], [n, n], [2])",
}

# Calls that accept some of the numbers, as limits or as numbers of what is not used. They end at once.
BOUNDED = {
    "EncryptionKey.rotate": "classes.EncryptionKey(key, '').rotate('absent', classes.EncryptionKey(key, ''), n)",
    "LoadPlan caches": "plan(caches=[n])",
    "LoadPlan window": "plan(window=n)",
    "Loader window": "classes.Loader(['b'], cpu, None, None, n).next()",
    "SavePlan window": "saves(window=n)",
    "UpdateSource.changes": "classes.UpdateSource(['b']).changes(['x'], [key], [[n, n]], [[]], n)",
}

# Numbers of requests and of a save, at each of whose positions a hostile number takes the place of the right one.
REQUESTS = {
    "whole": [1, 2, 0, 0],
    "chunk": [1, 3, 0, 0, 0],
    "region": [1, 1, 1, 1, 0, 0, 32, 0, 0],
    "mesh": [1, 0, 1, 1, 0, 0, 1, 0, 0],
}
TWO_RANKS = {"mesh": [1, 0, 1, 2, 0, 1, 0, 2, 0, 0]}
SAVES = {"region": [1, 1, 1, 1, 0, 0, 32, 0, 0, 0, 1, 32], "mesh": [1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 32]}
SAVES_OF_TWO = {"mesh": [1, 0, 1, 2, 0, 1, 0, 2, 0, 0, 0, 1, 32]}
MESHES = {"layout": [1, 2, 0, 1, 0, 2], "layout of two dimensions": [2, 2, 1, 0, 1, 0, 2, 0, 2]}
for make, lists in (
    ("plan", REQUESTS),
    ("plan_of_two", TWO_RANKS),
    ("saves", SAVES),
    ("saves_of_two", SAVES_OF_TWO),
    ("mesh_indices", MESHES),
):
    for kind, numbers in lists.items():
        for at in range(len(numbers)):
            replaced = f"[*{numbers[:at]}, n, *{numbers[at + 1 :]}]"
            BOUNDED[f"{make} of {kind} at {at}"] = f"{make}({replaced})"

# Calls with a vector `v` of another dtype, shape, layout or size than they take.
VECTORS = {
    "Checkpoint headers": "classes.Checkpoint(['a'], v)",
    "EncryptionKey.derived": "classes.EncryptionKey(v, '', [1, 8192], key[:16].clone())",
    "EncryptionKey.derive": "classes.EncryptionKey.derive(key, [1, 8192], key[:16].clone(), v)",
    "EncryptionKey": "classes.EncryptionKey(v, '')",
    "RanksLoad output": "classes.RanksLoad(plan(), 0, [v], cpu)",
    "LoadPlan requests": "plan(vector=v)",
    "RanksSave tensor": "classes.RanksSave(saves(), 0, ['new'], [''], [v])",
    "Update.stage positions": "write([key.clone()], [v], [key])",
    "SavePlan numbers": "saves(vector=v)",
    "Source.read": "classes.Source('a').read(90, v)",
    "_load_bytes": "ops._load_bytes(v)",
    "load_into": "ops.load_into(['a'], ['x'], [v])",
    "load_recipe_into": "ops.load_recipe_into(['a'], ['y'], ['y = x'], [v])",
    "prepare_update": "ops.prepare_update(['a'], ['x'], [v])",
}
WRONG = {
    "dtype": "torch.ones(32, dtype=torch.complex64)",
    "shape": "torch.ones(4, 9, dtype=torch.uint8)",
    "strides": "torch.ones(66, dtype=torch.int32)[::2]",
    "empty": "torch.ones(0, dtype=torch.bool)",
}

PROGRAM = f"""
import json
import os
import resource

import fst
import torch

classes, ops, cpu = torch.classes.fst, torch.ops.fst, torch.device("cpu")
key = torch.ones(32, dtype=torch.uint8)
fst.save_file({{"x": key}}, "a")
fst.save_file({{"x": key.view(4, 8), "y": torch.ones(4)}}, "b")
file = classes.Checkpoint(["b"])


def plan(numbers={REQUESTS["whole"]!r}, lists=(0,), caches=(-1,), window=1 << 20, vector=None):
    vector = torch.tensor(numbers) if vector is None else vector
    request = dict(list_of_rank=lists, caches=caches, strategy="auto", window_bytes=window, lengths=[len(vector)])
    return classes.LoadPlan(classes.Checkpoint(["a"]), vector, json.dumps(request))


def plan_of_two(numbers):
    return plan(numbers, lists=(0, 0), caches=(-1, -1))


def saves_of_two(numbers):
    return saves(numbers, ranks=2)


def mesh_indices(layout):
    return ops._call("mesh_indices", json.dumps([layout, [1 << 40], [0] * (layout[0] % 3)]))


def saves(numbers={SAVES["region"]!r}, ranks=1, window=1 << 20, vector=None):
    vector = torch.tensor(numbers) if vector is None else vector
    request = dict(names=["x"], metadata=[dict()], ranks=ranks, window_bytes=window, has_parts=False)
    return classes.SavePlan(vector, json.dumps(request))


def views(view):
    text = '{{"bases": [{{"stored": 0}}], "views": [%s]}}' % view
    classes.Checkpoint.load_views_into([file], text, [], [torch.zeros(1)])


def update():
    return ops.prepare_update(["a"], ["x"], [key.clone()])


def write(*lists):
    staged = classes.Update([], [])
    staged.stage(*lists, None)
    staged.commit()


def report(name, argument, call, **values):
    # Written before the call, which must not end the process.
    os.write(1, f"\\n{{name}}, {{argument}}: ".encode())
    try:
        exec(call, globals(), values)
        result = "done"
    except Exception as error:
        result = f"{{type(error).__name__}} " + " ".join(str(error).split())
    os.write(1, result.encode())


# A call that allocates by such a number fails to do so, and says that.
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), -1))
for name, call in {(REFUSED | BOUNDED)!r}.items():
    for n in {HOSTILE!r}:
        report(name, n, call, n=n)
for name, call in {VECTORS!r}.items():
    for kind, vector in {WRONG!r}.items():
        report(name, kind, call, v=eval(vector))
"""


def test_hostile_numbers_are_errors(fork_python):
    """No call crashes, hangs, allocates by such a number, or blames fst."""
    results = {}
    for line in fork_python(PROGRAM).strip().splitlines():
        case, result = line.split(": ", 1)
        results[tuple(case.split(", "))] = result
    cases = [(name, str(number)) for name in REFUSED | BOUNDED for number in HOSTILE]
    assert list(results) == cases + [(name, kind) for name in VECTORS for kind in WRONG]
    wrong = {
        case: result for case, result in results.items() if re.search(r"\[internal\]|out-of-memory|allocate", result)
    }
    wrong |= {case: result for case, result in results.items() if result == "done" and case[0] not in BOUNDED}
    assert not wrong
