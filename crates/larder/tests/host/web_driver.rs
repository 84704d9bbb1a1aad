//! A browser, driven by ChromeDriver over WebDriver (<https://www.w3.org/TR/webdriver2/>).

use std::path::Path;
use std::process::Command;

use larder_bench::campaign::process::Process;
use serde_json::{Value, json};

use super::support::{TEST_TIMEOUT, run_tool};
use super::{free_port, text, until};

/// Headless Chromium.
pub(super) struct Browser {
    _driver: Process,
    session: String,
    _profile: tempfile::TempDir,
}

impl Browser {
    pub(super) fn start() -> Self {
        let port = free_port();
        let mut command = Command::new("nice");
        command.args(["-n", "19", "chromedriver", &format!("--port={port}")]);
        let driver = Process::start(command).expect("starts");
        driver.wait_for("started successfully", TEST_TIMEOUT).expect("it listens");
        let profile = super::temp_dir_on_tmpfs();
        let options = json!({"args": [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--window-size=1280,900", format!("--user-data-dir={}", text(profile.path())),
            // Requests to other hosts fail.
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        ]});
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}
        }}});
        let sessions = format!("http://127.0.0.1:{port}/session");
        let told = post(&sessions, &wanted);
        let id = told["sessionId"].as_str().unwrap_or_else(|| panic!("no session: {told}")).to_owned();
        Self { _driver: driver, session: format!("{sessions}/{id}"), _profile: profile }
    }

    fn command(&self, name: &str, arguments: &Value) -> Value {
        let told = post(&format!("{}/{name}", self.session), arguments);
        assert!(told["error"].is_null(), "{name}: {told}");
        told
    }

    fn devtools(&self, name: &str, parameters: &Value) -> Value {
        self.command("goog/cdp/execute", &json!({"cmd": name, "params": parameters}))
    }

    pub(super) fn open(&self, url: &str) {
        self.command("url", &json!({"url": url}));
    }

    /// Logs in at the `larder host` at this URL with the token, in the form to which its pages lead.
    pub(super) fn log_in(&self, url: &str, token: &str) {
        self.open(&format!("{url}/"));
        self.wait("the form", "return location.pathname === '/login' && document.querySelector('#token') !== null;");
        self.run(&format!(
            "document.querySelector('#token').value = '{token}'; document.querySelector('form button').click();"
        ));
        self.wait("the dashboard", "return location.pathname === '/';");
    }

    /// Returns the result of a function with this body, run in the page.
    pub(super) fn run(&self, script: &str) -> Value {
        self.command("execute/sync", &json!({"script": script, "args": []}))
    }

    /// Waits until a function with this body returns a true value.
    pub(super) fn wait(&self, what: &str, script: &str) -> Value {
        until(what, || {
            let found = self.run(script);
            (!found.is_null() && found != json!(false)).then_some(found)
        })
    }

    /// Sets the screen's width, and a light or dark colour scheme.
    pub(super) fn look(&self, width: u32, is_dark: bool) {
        let is_phone = width < 600;
        let scale = if is_phone { 2 } else { 1 };
        let size = json!({"width": width, "height": 900, "deviceScaleFactor": scale, "mobile": is_phone});
        self.devtools("Emulation.setDeviceMetricsOverride", &size);
        let scheme = if is_dark { "dark" } else { "light" };
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.devtools("Emulation.setEmulatedMedia", &media);
    }

    /// Takes a screenshot of the whole page.
    pub(super) fn picture(&self, path: &Path) {
        let told = self.devtools("Page.captureScreenshot", &json!({"format": "png", "captureBeyondViewport": true}));
        let picture = told["data"].as_str().expect("a picture");
        let encoded = path.with_extension("base64");
        std::fs::write(&encoded, picture).expect("writes");
        run_tool("sh", &["-c", "base64 -d \"$0\" > \"$1\" && rm \"$0\"", text(&encoded), text(path)]);
    }

    /// Returns the browser's console messages.
    pub(super) fn complaints(&self) -> Vec<Value> {
        let told = self.command("se/log", &json!({"type": "browser"}));
        told.as_array().expect("a list").clone()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Deleting the session ends the browser's processes.
        let _ = Command::new("curl").args(["-sS", "-X", "DELETE", &self.session]).output();
    }
}

fn post(url: &str, body: &Value) -> Value {
    let body = body.to_string();
    let told = run_tool("curl", &["-sS", "-X", "POST", "-H", "Content-Type: application/json", "--data", &body, url]);
    let told: Value = serde_json::from_str(&told).expect("it is JSON");
    told["value"].clone()
}
