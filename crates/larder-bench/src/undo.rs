//! What is changed of the machine for an experiment is changed back.

use std::ffi::OsStr;
use std::process::{Child, Command, Stdio};

use anyhow::Context;

/// Waits for the end of its input, which comes with the end of this process however that ends.
const WAIT: &str = r#"trap "" INT TERM HUP; cat >/dev/null; "#;

/// Commands of a shell that run when this goes, or with the process, however it ends.
pub(crate) struct Undo {
    shell: Child,
}

impl Undo {
    /// `arguments` are `$1` and so on in `script`.
    pub(crate) fn new<A: AsRef<OsStr>>(script: &str, arguments: impl IntoIterator<Item = A>) -> anyhow::Result<Self> {
        let shell = Command::new("sh")
            .args(["-c", &format!("{WAIT}{script}"), "sh"])
            .args(arguments)
            .stdin(Stdio::piped())
            .spawn()
            .context("starting sh")?;
        Ok(Self { shell })
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        match self.shell.wait() {
            Ok(status) if status.success() => {}
            ended => eprintln!("the machine may not be as it was before: {ended:?}"),
        }
    }
}
