//! What the commands print: their results, on standard output.

use std::fmt::{Display, Write as _};
use std::io::{self, ErrorKind, Write};

use anyhow::Context;

/// Prints all of `text`. Where the reader has gone (`| head`) the rest is not wanted, and the command ends as it would
/// have.
///
/// # Errors
/// It cannot be written, as on a full file system.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to standard output"),
    }
}

/// Lines of a name and what there is to say.
#[derive(Default)]
pub(crate) struct Lines(String);

impl Lines {
    /// What is said under this name.
    pub(crate) fn line(&mut self, name: &str, value: impl Display) {
        let _ = writeln!(self.0, "{:<18}{value}", format!("{name}:"));
    }

    /// A line of a table, or of a list.
    pub(crate) fn row(&mut self, text: impl Display) {
        let _ = writeln!(self.0, "  {text}");
    }

    /// All of them.
    pub(crate) fn into_text(self) -> String {
        self.0
    }
}
