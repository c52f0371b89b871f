"""Bodies of messages for benchmarks."""

import json
import random

__all__ = ["body"]

CITIES = ("Lisbon", "Porto", "Braga", "Coimbra", "Faro", "Aveiro", "Setúbal", "Évora")


def body(size: int) -> bytes:
    """A JSON text of about *size* bytes, with names, numbers and words, as applications send them."""
    order = {"id": random.getrandbits(48), "city": random.choice(CITIES), "cents": random.randrange(10**6)}
    lines: list[dict[str, object]] = []
    text = json.dumps(order)
    while len(text) < size - 40:
        sku, note = f"{random.getrandbits(32):08x}", random.choice(CITIES)
        lines.append({"sku": sku, "count": random.randrange(9), "note": note})
        text = json.dumps({**order, "lines": lines})
    return text.encode()
