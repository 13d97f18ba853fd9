import os

# OpenMP's threads spin between two products, by default for milliseconds. Beside another busy process a spinning team
# waits for a thread that has no core, and a forward takes seconds instead of milliseconds. libgomp reads this when
# torch is loaded, which is later.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
