"""The decision tree of the page on choosing a strategy: questions from top to bottom, answers to the right."""

from .drawing import Drawing

QUESTIONS = (
    (("Is one device fast enough,", "and does training fit?"), "yes", (("single", "one process, one device"),)),
    (
        (
            "Do parameters, gradients",
            "and optimizer state fit on",
            "one device (with Adam 16",
            "bytes for a parameter)?",
        ),
        "yes",
        (
            ("ddp", "the first choice"),
            ("ddp + compression", "if the network is slow"),
            ("local_sgd, diloco", "even slower; other result"),
            ("ps", "if ranks differ in speed"),
        ),
    ),
    (("Does all but the optimizer", "state fit?"), "yes", (("zero1", "optimizer state divided"),)),
    (
        ("Is one layer too large, or", "has a step fewer samples", "than devices?"),
        "yes",
        (("tp", "within a node"), ("fsdp+tp, hsdp+tp", "on more devices than that")),
    ),
    (
        ("Are the links between", "devices fast (a node,", "InfiniBand)?"),
        "yes",
        (("fsdp", "on one node"), ("hsdp", "on several nodes")),
    ),
    (
        ("Has the module repeated", "blocks to cut at?"),
        "yes",
        (("pp", "one pipeline"), ("pp+ddp, pp+fsdp", "on more devices than stages")),
    ),
    (("None of these?",), "so", (("fsdp", "or write pipeline_stages()"),)),
)
LEFT, QUESTION, GAP, ANSWER = 10, 206, 36, 198


def draw() -> Drawing:
    """The whole tree."""
    drawing = Drawing("Which strategy to choose", 2 * LEFT + QUESTION + GAP + ANSWER)
    y = 12.0
    for number, (lines, word, answers) in enumerate(QUESTIONS):
        height = max(24 + 17 * (len(lines) - 1) + 10, 14 + 36 * len(answers))
        drawing.box(LEFT, y, QUESTION, height, "card")
        drawing.lines(LEFT + 12, y + (height - 17 * (len(lines) - 1)) / 2 + 5, lines)
        middle = y + height / 2
        drawing.arrow([(LEFT + QUESTION, middle), (LEFT + QUESTION + GAP, middle)])
        drawing.text(LEFT + QUESTION + 8, middle - 6, word, "soft")
        drawing.box(LEFT + QUESTION + GAP, y, ANSWER, height, "mark")
        top = y + (height - 36 * len(answers)) / 2
        for flag, note in answers:
            drawing.text(LEFT + QUESTION + GAP + 12, top + 15, flag, "code bold")
            drawing.text(LEFT + QUESTION + GAP + 12, top + 30, note, "soft")
            top += 36
        y += height
        if number < len(QUESTIONS) - 1:
            drawing.arrow([(LEFT + 40, y), (LEFT + 40, y + 30)])
            drawing.text(LEFT + 50, y + 20, "no", "soft")
            y += 30
    return drawing
