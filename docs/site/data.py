"""A picture of which rank gets which sample: dealt in turn to train, in windows to evaluate."""

from .drawing import COLOURS, Drawing

NUM_SAMPLES, RANKS, BATCH = 10, 2, 2
_WIDTH, _LEFT, _CELL = 440, 92, 32


def draw() -> Drawing:
    """Ten samples on two ranks, in batches of two: the order, and below it each rank's part of it."""
    drawing = Drawing("Which rank gets which sample", _WIDTH)
    window = RANKS * BATCH
    train = [i % RANKS for i in range(NUM_SAMPLES)]
    whole = NUM_SAMPLES // window * window
    rest = -(-(NUM_SAMPLES - whole) // RANKS)
    evaluate = [i % window // BATCH if i < whole else (i - whole) // rest for i in range(NUM_SAMPLES)]
    for row, (title, owners) in enumerate((("train", train), ("evaluate", evaluate))):
        y = 34 + row * 62
        drawing.text(12, y + 20, title, "bold")
        for i, owner in enumerate(owners):
            x = _LEFT + i * _CELL + i // window * 6
            drawing.cell(x, y, _CELL - 3, COLOURS[owner])
            drawing.label(x + (_CELL - 3) / 2, y + 19, str(i))
    for number in range(-(-NUM_SAMPLES // window)):
        x = _LEFT + number * (window * _CELL + 6)
        drawing.text(x, 24, f"step {number + 1}", "soft")
    for rank in range(RANKS):
        drawing.cell(_LEFT + rank * 90, 150, 12, COLOURS[rank])
        drawing.text(_LEFT + rank * 90 + 18, 161, f"rank {rank}", "soft")
    return drawing
