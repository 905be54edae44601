"""A headless Chromium, driven by the W3C's WebDriver protocol: Debian's chromium-driver speaks it."""

import json
import re
import shutil
import subprocess
import urllib.request

from processes import start

KEYS = {"Home": "\ue011", "End": "\ue010", "Left": "\ue012", "Up": "\ue013", "Right": "\ue014",
        "Down": "\ue015", "Tab": "\ue004", "Escape": "\ue00c"}
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference


def found():
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


class Browser:
    """Ends with its test case."""

    def __init__(self, case, *switches, width=1280, height=800):
        driver = start(case, "chromedriver", "--port=0", stdout=subprocess.PIPE, text=True)
        line = next(line for line in driver.stdout if "started successfully" in line)
        port = re.search(r"port (\d+)", line)[1]
        self.address = f"http://127.0.0.1:{port}/session"
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                 f"--window-size={width},{height}", *switches]
        asked = {"alwaysMatch": {"goog:chromeOptions": {"args": words}}}
        self.address += f"/{self.ask('', capabilities=asked)['sessionId']}"
        case.addCleanup(self.ask, "", "DELETE")
        # Some versions count the window's frame, others do not. A page sees what is inside.
        seen = self.run("return [innerWidth, innerHeight]")
        self.ask("/window/rect", width=2 * width - seen[0], height=2 * height - seen[1])

    def ask(self, path, method="POST", **words):
        request = urllib.request.Request(self.address + path, method=method,
                                         data=json.dumps(words).encode() if method == "POST" else None)
        with urllib.request.urlopen(request, timeout=100) as answer:
            return json.load(answer)["value"]

    def open(self, file):
        self.ask("/url", url=file.resolve().as_uri())

    def run(self, script, *arguments):
        """What a script in the page returns."""
        return self.ask("/execute/sync", script=script, args=list(arguments))

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def press(self, *keys):
        """Keys by name, where the focus is."""
        presses = [{"type": kind, "value": KEYS.get(key, key)}
                   for key in keys for kind in ("keyDown", "keyUp")]
        self.ask("/actions", actions=[{"type": "key", "id": "keyboard", "actions": presses}])

    def point(self, selector):
        """The pointer to the middle of an element."""
        element = self.ask("/element", using="css selector", value=selector)
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0,
                "origin": {ELEMENT: element[ELEMENT]}}
        self.ask("/actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def click(self, selector):
        element = self.ask("/element", using="css selector", value=selector)
        self.ask(f"/element/{element[ELEMENT]}/click")
