//! Output of the commands' results, on standard output.

use std::fmt::{Display, Write as _};
use std::io::{self, ErrorKind, Write};

use anyhow::Context;
use larder_block::{printable, printable_lines};

/// Prints all of `text`, with control characters escaped. If the reader has closed the pipe (`| head`), the rest is
/// dropped, and the command ends as it would have otherwise.
///
/// # Errors
/// Standard output cannot be written, as on a full file system.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(printable_lines(text).as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to standard output"),
    }
}

/// Writes a message to standard error in one write, because a guest's console may be on the same terminal. Names in
/// it, which the author of an image or a peer may have chosen, produce neither control sequences nor a line that looks
/// like a message of its own. An error is ignored: the exit status reports the result.
pub(crate) fn print_stderr(message: &str) {
    let text = printable_lines(message).replace('\n', "\n  ");
    let _ = io::stderr().write_all(format!("larder: {text}\n").as_bytes());
}

/// Text of lines with a name and a value each.
#[derive(Default)]
pub(crate) struct Lines(String);

impl Lines {
    /// Adds a value under a name.
    pub(crate) fn line(&mut self, name: &str, value: impl Display) {
        let value = printable(&value.to_string());
        let _ = writeln!(self.0, "{:<18}{value}", format!("{name}:"));
    }

    /// Adds a line of a table or list.
    pub(crate) fn row(&mut self, text: impl Display) {
        let _ = writeln!(self.0, "  {}", printable(&text.to_string()));
    }

    /// Returns the text of all lines.
    pub(crate) fn into_text(self) -> String {
        self.0
    }
}

/// Table whose columns have headings: text is aligned left, numbers right.
pub(crate) struct Table<const N: usize>(Vec<[String; N]>);

impl<const N: usize> Table<N> {
    /// Creates a table with these column headings.
    pub(crate) fn new(names: [&str; N]) -> Self {
        Self(vec![names.map(str::to_owned)])
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, row: [String; N]) {
        self.0.push(row.map(|cell| printable(&cell)));
    }

    /// Returns the text of the whole table.
    pub(crate) fn into_text(self) -> String {
        let is_number = |cell: &str| cell.parse::<f64>().is_ok();
        let column = |at: usize| self.0.iter().map(move |row| row[at].as_str());
        let widths: [usize; N] =
            std::array::from_fn(|at| column(at).map(|cell| cell.chars().count()).max().unwrap_or_default());
        let numbers: [bool; N] = std::array::from_fn(|at| {
            let mut cells = column(at).skip(1).filter(|cell| *cell != "-").peekable();
            cells.peek().is_some() && cells.all(is_number)
        });
        let mut text = String::new();
        for row in &self.0 {
            let mut line = String::new();
            for (at, cell) in row.iter().enumerate() {
                let width = widths[at];
                let _ = match numbers[at] {
                    true => write!(line, "{cell:>width$}  "),
                    false => write!(line, "{cell:<width$}  "),
                };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}
