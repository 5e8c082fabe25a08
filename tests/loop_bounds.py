"""Finds variables of kernels that Triton's compiler never updates.

What a loop carries from one round to the next is dead for Triton 3.6 if nothing uses it but the bounds of a
loop inside: those are not looked at (triton 9036), and every round sees the first value:

    first = 4
    for tile in range(program, num_tiles):
        for column in range(first, num_columns):  # from 4 on, for every tile
            ...
        first = 0

Neither an interpreter nor Python does so. The way out is a value that is computed in each round.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator


def frozen_bounds(source: str) -> list[str]:
    """``function: variable`` of every such variable in a module of kernels."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and any(
            "jit" in ast.unparse(d) for d in function.decorator_list
        ):
            for loop in ast.walk(function):
                if isinstance(loop, ast.For) and _is_compiled_loop(loop):
                    found += [f"{function.name}: {name}" for name in sorted(_frozen(function, loop))]
    return found


def _frozen(function: ast.FunctionDef, loop: ast.For) -> set[str]:
    before = {argument.arg for argument in function.args.args}
    live = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.lineno < loop.lineno and isinstance(node.ctx, ast.Store):
            before.add(node.id)
        if isinstance(node, ast.Name) and node.lineno > (loop.end_lineno or 0):
            live.add(node.id)
    assigned: list[tuple[set[str], set[str]]] = []
    bounds: set[str] = set()
    for statement in loop.body:
        for node in _parts(statement):
            if isinstance(node, ast.Assign | ast.AugAssign) and not _may_do_more(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                assigned.append(({n for target in targets for n in _names(target)}, set(_names(node.value))))
            elif isinstance(node, ast.For) and _is_compiled_loop(node):
                bounds |= set(_names(node.iter))
            else:
                live |= set(_names(node))
    stored = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    reaching = set(bounds)
    for _ in assigned:
        for targets, sources in assigned:
            live |= sources if targets & live else set()
            reaching |= sources if targets & reaching else set()
    return (before & stored & reaching) - live


def _parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """Assignments, loops and whatever else there is, each without the statements inside of it."""
    if isinstance(statement, ast.For):
        yield statement if _is_compiled_loop(statement) else statement.iter
    elif isinstance(statement, ast.If | ast.While):
        yield statement.test
    else:
        yield statement
    for inside in (*getattr(statement, "body", ()), *getattr(statement, "orelse", ())):
        yield from _parts(inside)


def _is_compiled_loop(loop: ast.For) -> bool:
    return isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func).split(".")[-1] == "range"


def _may_do_more(value: ast.expr) -> bool:
    """Whether it calls a function of ours, which may write or wait."""
    calls = [ast.unparse(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)]
    return any(not name.startswith(("gl.", "tl.")) for name in calls)


def _names(node: ast.AST) -> Iterator[str]:
    return (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
