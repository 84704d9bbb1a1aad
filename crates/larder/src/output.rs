//! What the commands print: their results, on standard output.

use std::fmt::{Display, Write as _};
use std::io::{self, ErrorKind, Write};

use anyhow::Context;
use larder_block::{printable, printable_lines};

/// Prints all of `text`, its control characters escaped. Where the reader has gone (`| head`) the rest is not wanted, and the command ends as it would
/// have.
///
/// # Errors
/// It cannot be written, as on a full file system.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(printable_lines(text).as_bytes())
        .and_then(|()| stdout.flush())
    {
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
        let value = printable(&value.to_string());
        let _ = writeln!(self.0, "{:<18}{value}", format!("{name}:"));
    }

    /// A line of a table, or of a list.
    pub(crate) fn row(&mut self, text: impl Display) {
        let _ = writeln!(self.0, "  {}", printable(&text.to_string()));
    }

    /// All of them.
    pub(crate) fn into_text(self) -> String {
        self.0
    }
}

/// Columns under their names: text to the left, numbers to the right.
pub(crate) struct Table<const N: usize>(Vec<[String; N]>);

impl<const N: usize> Table<N> {
    /// A table with these columns.
    pub(crate) fn new(names: [&str; N]) -> Self {
        Self(vec![names.map(str::to_owned)])
    }

    /// A line more.
    pub(crate) fn row(&mut self, row: [String; N]) {
        self.0.push(row.map(|cell| printable(&cell)));
    }

    /// All of it.
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
