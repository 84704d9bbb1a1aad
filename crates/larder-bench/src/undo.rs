//! Restores changes that an experiment makes to the machine.

use std::ffi::OsStr;
use std::process::{Child, Command, Stdio};

use anyhow::Context;

/// Waits for the end of the shell's input, which comes when this process ends in any way.
const WAIT: &str = r#"trap "" INT TERM HUP; cat >/dev/null; "#;

/// Shell commands that run when this is dropped or the process ends in any way.
pub(crate) struct Undo {
    shell: Child,
}

impl Undo {
    /// Registers `script`, which runs with `arguments` as `$1` and so on.
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
            exit_status => eprintln!("the machine's previous state may not be restored: {exit_status:?}"),
        }
    }
}
