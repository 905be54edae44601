"""The colours of all pictures: those of the lessons (figure_drawing.py), and the page of `lockstep show`
(step_drawing.py). A kind of bar has one colour in both."""

from step_rows import ALONG_AXES, HOST, MEMORY, MESSAGES, OTHER, PRODUCTS, SEVERAL

# Colour and letters. The first ones are those of Okabe and Ito (2008), which readers tell apart who see red and
# green alike. All are the same in light and in dark mode, where a bar's edge has the colour of the text.
BLUE, SKY, ORANGE, GREEN, PINK, RED, YELLOW = (
    ("#0072b2", "#ffffff"), ("#56b4e9", "#000000"), ("#e69f00", "#000000"), ("#009e73", "#000000"),
    ("#cc79a7", "#000000"), ("#d55e00", "#000000"), ("#f0e442", "#000000"))
WHITE, GREY, DARK_GREY, WINE = (
    ("#ffffff", "#000000"), ("#b8bec4", "#000000"), ("#4d4d4d", "#ffffff"), ("#882255", "#ffffff"))
STEP = {"forward": SKY, "backward": BLUE, MESSAGES: ORANGE, PRODUCTS: BLUE, OTHER: GREY, HOST: WHITE, MEMORY: YELLOW}
ALONG = {**dict(zip(map(ALONG_AXES.get, ("data", "shard", "tensor", "pipeline")), (RED, GREEN, PINK, DARK_GREY))),
         SEVERAL: WINE}

# Light, dark.
INK, PAPER = ("#1c1e21", "#e8eaed"), ("#ffffff", "#17191c")
PALE, RULE = ("#57606a", "#a9b1b9"), ("#c8ced4", "#454b52")
MARK = ("#b8470a", "#ff9a3c")  # what a reader has chosen
