"""A headless Chromium, driven by the DevTools protocol over a pipe: no package is needed.

https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

PATIENCE_S = 60


def find():
    """The command of Chromium, or None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Chromium:
    """The browser; a context manager that ends it.

    Args:
        profile: a new folder for what it keeps.
    """

    def __init__(self, profile):
        self.number, self.events, self.buffer = 0, [], b""
        commands, self.to = os.pipe()
        self.answers, answers = os.pipe()
        # Chromium reads its descriptor 3 and writes 4: from numbers that are neither of them.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
        flags = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}",
                 "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
                 "--disable-background-networking", "--disable-dev-shm-usage", "--hide-scrollbars"]
        redirected = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        self.process = subprocess.Popen(["bash", "-c", redirected, "bash", find(), *flags],
                                        pass_fds=ends, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (commands, answers, *ends):
            os.close(end)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.call("Browser.close")
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired, AssertionError):
            self.process.kill()
            self.process.wait()
        os.close(self.to)
        os.close(self.answers)

    def call(self, method, session=None, **params):
        """Give a command and wait for its result; what happens meanwhile goes into `events`."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _next(self):
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(self.answers, 1 << 20) if ready else b""
            assert chunk, "Chromium does not answer"
            self.buffer += chunk
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path, width=1280, height=800, language="en", dark=False):
        """Open a file in a new tab, a `Page`, as wide as a window of a desktop or a phone."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)
        page.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        agent = self.call("Browser.getVersion")["userAgent"]
        page.call("Emulation.setUserAgentOverride", userAgent=agent, acceptLanguage=language)
        page.call("Page.navigate", url=path.resolve().as_uri())
        page.wait_for("Page.loadEventFired")
        page.drawn()
        return page


class Page:
    """A tab of the browser."""

    def __init__(self, browser, session):
        self.browser, self.session = browser, session

    def call(self, method, **params):
        """A command for this tab."""
        return self.browser.call(method, self.session, **params)

    def events(self, name):
        """The parameters of all events of that name in this tab, so far."""
        return [event["params"] for event in self.browser.events
                if event.get("sessionId") == self.session and event["method"] == name]

    def wait_for(self, name):
        """Wait until such an event has come."""
        while not self.events(name):
            self.browser.events.append(self.browser._next())

    def run(self, expression):
        """The value of a JavaScript expression, or of the promise that it gives."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True,
                           awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def drawn(self):
        """Wait until what has changed is on the screen."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def mouse(self, kind, x, y, **more):
        """`mouseMoved`, `mousePressed`, `mouseReleased` or `mouseWheel`, in the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.drawn()

    def touch(self, kind, *points):
        """`touchStart`, `touchMove` or `touchEnd`, with the (x, y) of each finger."""
        self.call("Input.dispatchTouchEvent", type=kind,
                  touchPoints=[{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)])
        self.drawn()

    def press(self, key):
        """A key, by its name in JavaScript."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)
        self.drawn()

    def text(self, selector):
        """What stands in an element."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def screenshot(self, path):
        """Write what a reader sees, the whole page, as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self):
        """Errors and warnings of the console, and what was thrown."""
        logged = [event["entry"]["text"] for event in self.events("Log.entryAdded")]
        called = [str(event["args"]) for event in self.events("Runtime.consoleAPICalled")]
        thrown = [str(event["exceptionDetails"])
                  for event in self.events("Runtime.exceptionThrown")]
        return logged + called + thrown

    def requests(self):
        """The addresses that the page has asked for."""
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]
