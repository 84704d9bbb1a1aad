//! What an experiment leaves on the machine goes with it, however it ends.

use std::ffi::OsStr;
use std::process::{Child, Command, Stdio};

use anyhow::Context;

/// Its input ends with this process, whatever ends that.
const AFTERWARDS: &str = r#"trap "" INT TERM HUP; cat >/dev/null; "#;

/// A shell that does something when this goes, or this process.
pub(super) struct Undo(Child);

impl Undo {
    /// `arguments` are `$1` and so on in `script`.
    pub(super) fn new(script: &str, arguments: &[impl AsRef<OsStr>]) -> anyhow::Result<Self> {
        let shell = Command::new("sh")
            .args(["-c", &format!("{AFTERWARDS}{script}"), "sh"])
            .args(arguments)
            .stdin(Stdio::piped())
            .spawn()
            .context("starting sh")?;
        Ok(Self(shell))
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        if !self.0.wait().is_ok_and(|status| status.success()) {
            eprintln!("not all that was made for the experiment could be removed");
        }
    }
}
