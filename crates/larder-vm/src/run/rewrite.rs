//! A command line under rewrite: replacements of arguments, additions at the end, and a list of the changes.

use super::arguments::{Argument, join};

/// QEMU's arguments, each unchanged or replaced.
#[derive(Debug)]
pub(super) struct CommandLineRewrite {
    arguments: Vec<Argument>,
    replacements: Vec<Option<Vec<Argument>>>,
    appended: Vec<Argument>,
    /// Descriptions of the changes for the user, one line each.
    pub(super) changes: Vec<String>,
}

impl CommandLineRewrite {
    pub(super) fn new(arguments: Vec<Argument>) -> Self {
        Self { replacements: vec![None; arguments.len()], arguments, appended: Vec::new(), changes: Vec::new() }
    }

    /// Returns the original arguments.
    pub(super) fn arguments(&self) -> &[Argument] {
        &self.arguments
    }

    /// Returns the indexes and values of the original options called `name`.
    pub(super) fn options<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (usize, &'a str)> {
        let texts = self.arguments.iter().map(move |argument| argument.value_str_of(name));
        texts.enumerate().filter_map(|(index, text)| Some((index, text?)))
    }

    /// Replaces the argument at `index` by `new`.
    pub(super) fn replace(&mut self, index: usize, new: Vec<Argument>) {
        self.replacements[index] = Some(new);
    }

    /// Adds an argument at the end.
    pub(super) fn append(&mut self, argument: Argument) {
        self.appended.push(argument);
    }

    /// Returns the words of the new command line.
    pub(super) fn into_words(self) -> Vec<std::ffi::OsString> {
        let pairs = self.arguments.into_iter().zip(self.replacements);
        let rewritten = pairs.flat_map(|(old, new)| new.unwrap_or_else(|| vec![old]));
        join(rewritten.chain(self.appended))
    }
}
