"""What kinds of operations there are in a drawn step, and their colours."""

# Label, colour, words (the name contains one of them).
MESSAGES = "copies and collectives"
PRODUCTS = "convolutions and products"
OTHER = "other operations"
KINDS = (
    (MESSAGES, "#c04f00",
     ("copy", "all_reduce", "all_gather", "broadcast", "reduce_scatter", "send", "recv", "transfers")),
    (PRODUCTS, "#6a51a3", ("conv2d", "matmul")),
    (OTHER, "#a9b0b7", ("",)),
)
COLOURS = {label: colour for label, colour, _ in KINDS}


def kind_of(operation):
    return next(label for label, _, words in KINDS if any(word in operation for word in words))
