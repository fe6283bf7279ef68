"""A line of plan.md's table: python launch/plan.py ... --json | python launch/bench/plan_row.py NAME BATCH

BATCH is the recipe's own: days and energy are of as many samples as its steps take by it.
"""

import json
import sys

_STATES = "weights", "masters", "moments", "gradients", "average"


def row(name: str, own_batch: int, plan: dict) -> str:
    """The line; `plan` is what plan.py --json prints."""
    choices, device, share = plan["choices"], plan["device"], own_batch / plan["batch"]
    learned = sum(number for part, number in plan["weights"].items() if not part.startswith("frozen/"))
    states, taken = sum(device.get(kind, 0) for kind in _STATES), plan["device_bytes"]
    model = f"{name}, {choices['zero_optimization.stage']}, `{choices['model.recompute']}`, {choices['batch.micro']}"
    memory = (f"{size / 1e9:.1f} GB" for size in (states, taken - states, taken + plan["reserve_bytes"]))
    cells = [
        model,
        f"{learned / 1e9:.2f} B",
        f"{plan['world']:,}",
        *memory,
        f"{1000 * plan['seconds']['total']:.3g}",
        f"{plan['samples_per_second']:,.0f}",
        f"{100 * plan['mfu']:.0f} %",
        f"{share * plan['days']:.2f}",
        f"{share * plan['kwh'] / 1000:.3g}",
        f"{plan['checkpoint_bytes'] / 1e9:.0f} GB",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(row(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)))
