//! Drives a real Chromium without a window, by the `DevTools` protocol over pipes.

use std::{
    fs::{File, OpenOptions},
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use nix::{sys::stat::Mode, unistd::mkfifo};
use serde_json::{Value, json};
use shunt_tests::{
    process::ChildProcess,
    world::{Host, World},
};

/// When the browser is ended, in seconds.
const LIMIT: u32 = 300;
const WIDTH: u32 = 1200;
const HEIGHT: u32 = 760;

/// A browser in the network namespace of a host, with one page. It ends when its pipes are closed.
pub(crate) struct Browser {
    commands: File,
    answers: BufReader<File>,
    session: Option<String>,
    last_id: u64,
    /// What the browser complained about: a script that failed or was not allowed.
    complaints: Vec<String>,
    log: PathBuf,
    _process: ChildProcess,
}

impl Browser {
    /// Starts the browser on a host.
    pub(crate) fn start(world: &World, host: Host) -> Result<Self> {
        let directory = world.directory().join("browser");
        std::fs::create_dir_all(&directory)?;
        let [commands, answers, log] = ["commands", "answers", "log"].map(|name| directory.join(name));
        for pipe in [&commands, &answers] {
            mkfifo(pipe, Mode::S_IRUSR | Mode::S_IWUSR)?;
        }
        // The sandbox of the browser does not work for root.
        let line = format!(
            "HOME={profile} exec timeout {LIMIT} chromium --headless --no-sandbox --disable-gpu --no-first-run \
             --disable-background-networking --disable-component-update --user-data-dir={profile} \
             --window-size={WIDTH},{HEIGHT} --remote-debugging-pipe 3<{} 4>{}",
            commands.display(),
            answers.display(),
            profile = directory.display()
        );
        let process =
            world.spawn(host, Path::new("/bin/sh"), &["-c".to_owned(), line], &File::create(&log)?)?;
        // The shell opens the pipes in this order, and each side waits for the other.
        let commands = OpenOptions::new().write(true).open(commands)?;
        let answers = BufReader::new(File::open(answers)?);
        let (session, last_id, complaints) = (None, 0, Vec::new());
        let mut browser = Self { commands, answers, session, last_id, complaints, log, _process: process };
        browser.open_page().context("cannot start chromium (of the package chromium)")?;
        Ok(browser)
    }

    fn open_page(&mut self) -> Result<()> {
        let target = self.call("Target.createTarget", &json!({"url": "about:blank"}))?;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = self.call("Target.attachToTarget", &attach)?;
        self.session = attached["sessionId"].as_str().map(ToOwned::to_owned);
        for domain in ["Page.enable", "Log.enable", "Runtime.enable"] {
            self.call(domain, &json!({}))?;
        }
        Ok(())
    }

    /// Lets pages run scripts, or not, from the next page on.
    pub(crate) fn set_scripts(&mut self, enabled: bool) -> Result<()> {
        self.call("Emulation.setScriptExecutionDisabled", &json!({"value": !enabled})).map(drop)
    }

    /// Prefers dark or light colours.
    pub(crate) fn set_dark(&mut self, dark: bool) -> Result<()> {
        let scheme = if dark { "dark" } else { "light" };
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", &features).map(drop)
    }

    /// Loads a page. Returns its document as it is then. Fails if the browser complains.
    pub(crate) fn load(&mut self, url: &str) -> Result<String> {
        let loading = self.call("Page.navigate", &json!({"url": url}))?;
        if let Some(error) = loading["errorText"].as_str() {
            bail!("{url}: {error}");
        }
        self.wait_for("Page.loadEventFired")?;
        self.document()
    }

    /// Returns the document.
    pub(crate) fn document(&mut self) -> Result<String> {
        let document = self.call("DOM.getDocument", &json!({}))?;
        let html = self.call("DOM.getOuterHTML", &json!({"nodeId": document["root"]["nodeId"]}))?;
        if let Some(complaint) = self.complaints.first() {
            bail!("the browser complains: {complaint}");
        }
        html["outerHTML"].as_str().map(ToOwned::to_owned).context("no document")
    }

    /// Writes into a field, as a person does.
    pub(crate) fn write_into(&mut self, selector: &str, text: &str) -> Result<()> {
        let node = self.find(selector)?;
        self.call("DOM.focus", &json!({"nodeId": node}))?;
        self.call("Input.insertText", &json!({"text": text})).map(drop)
    }

    /// Clicks on an element that leads to another page, and waits for that.
    pub(crate) fn click(&mut self, selector: &str) -> Result<String> {
        let node = self.find(selector)?;
        self.call("DOM.scrollIntoViewIfNeeded", &json!({"nodeId": node}))?;
        let quads = self.call("DOM.getContentQuads", &json!({"nodeId": node}))?;
        let at = |index: usize| quads["quads"][0][index].as_f64().context("the element is not on the screen");
        let (x, y) = (f64::midpoint(at(0)?, at(4)?), f64::midpoint(at(1)?, at(5)?));
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1});
            self.call("Input.dispatchMouseEvent", &event)?;
        }
        self.wait_for("Page.loadEventFired")?;
        self.document()
    }

    /// Returns a picture of the page, as PNG.
    pub(crate) fn picture(&mut self) -> Result<Vec<u8>> {
        let picture = self.call("Page.captureScreenshot", &json!({"format": "png"}))?;
        Ok(BASE64_STANDARD.decode(picture["data"].as_str().context("no picture")?)?)
    }

    fn find(&mut self, selector: &str) -> Result<Value> {
        let document = self.call("DOM.getDocument", &json!({}))?;
        let query = json!({"nodeId": document["root"]["nodeId"], "selector": selector});
        let found = self.call("DOM.querySelector", &query)?;
        ensure!(found["nodeId"] != 0, "the page has no {selector}");
        Ok(found["nodeId"].clone())
    }

    fn call(&mut self, method: &str, parameters: &Value) -> Result<Value> {
        self.last_id += 1;
        let mut message = json!({"id": self.last_id, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.commands.write_all(&[message.to_string().as_bytes(), b"\0"].concat())?;
        loop {
            let answer = self.receive().with_context(|| method.to_owned())?;
            if answer["id"] == self.last_id {
                return match answer.get("error") {
                    Some(error) => bail!("{method}: {error}"),
                    None => Ok(answer["result"].clone()),
                };
            }
        }
    }

    fn wait_for(&mut self, event: &str) -> Result<()> {
        while self.receive().with_context(|| event.to_owned())?["method"] != event {}
        Ok(())
    }

    /// Returns the next message, and remembers a complaint.
    fn receive(&mut self) -> Result<Value> {
        let mut message = Vec::new();
        self.answers.read_until(0, &mut message)?;
        if message.pop() != Some(0) {
            bail!("the browser has ended: {}", std::fs::read_to_string(&self.log)?);
        }
        let message: Value = serde_json::from_slice(&message)?;
        let is_complaint = match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Log.entryAdded") => message["params"]["entry"]["level"] == "error",
            _ => false,
        };
        if is_complaint {
            self.complaints.push(message["params"].to_string());
        }
        Ok(message)
    }
}
