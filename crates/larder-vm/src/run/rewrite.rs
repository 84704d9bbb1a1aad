//! A command line being rewritten: what each argument becomes, what is added at the end, and what was changed.

use super::arguments::{Argument, join};

/// QEMU's arguments, each still itself or replaced.
#[derive(Debug)]
pub(super) struct Rewrite {
    arguments: Vec<Argument>,
    replacements: Vec<Option<Vec<Argument>>>,
    appended: Vec<Argument>,
    /// One line each, for the user.
    pub(super) changes: Vec<String>,
}

impl Rewrite {
    pub(super) fn new(arguments: Vec<Argument>) -> Self {
        Self {
            replacements: vec![None; arguments.len()],
            arguments,
            appended: Vec::new(),
            changes: Vec::new(),
        }
    }

    /// The arguments as they were given.
    pub(super) fn arguments(&self) -> &[Argument] {
        &self.arguments
    }

    /// The indices and values of the options called `name`, as they were given.
    pub(super) fn options<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (usize, &'a str)> {
        let texts = self.arguments.iter().map(move |argument| argument.text_of(name));
        texts.enumerate().filter_map(|(index, text)| Some((index, text?)))
    }

    /// Puts `new` in the place of the argument at `index`.
    pub(super) fn replace(&mut self, index: usize, new: Vec<Argument>) {
        self.replacements[index] = Some(new);
    }

    /// Adds an argument at the end.
    pub(super) fn append(&mut self, argument: Argument) {
        self.appended.push(argument);
    }

    /// The words of the new command line.
    pub(super) fn into_words(self) -> Vec<std::ffi::OsString> {
        let kept = self.arguments.into_iter().zip(self.replacements);
        let rewritten = kept.flat_map(|(old, new)| new.unwrap_or_else(|| vec![old]));
        join(rewritten.chain(self.appended))
    }
}
