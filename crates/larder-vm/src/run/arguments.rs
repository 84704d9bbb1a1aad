//! QEMU's command line as a list of options with their values, from which it can be restored word by word.

use std::ffi::{OsStr, OsString};

use super::option_names::takes_value;

/// An option, with its value if it has one; or a word that is not an option, which QEMU takes for a disk image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    flag: OsString,
    value: Option<OsString>,
}

impl Argument {
    /// Returns `-name value`.
    pub fn option(name: &str, value: impl ToString) -> Self {
        Self { flag: format!("-{name}").into(), value: Some(value.to_string().into()) }
    }

    /// Returns `-name value` with a value that need not be UTF-8.
    pub fn option_os(name: &str, value: OsString) -> Self {
        Self { flag: format!("-{name}").into(), value: Some(value) }
    }

    /// Returns the option's name without its dashes, or `None` for a plain word.
    pub fn name(&self) -> Option<&str> {
        option_name(&self.flag)
    }

    /// Returns a word that is not an option, which QEMU takes for a disk image.
    pub fn plain_word(&self) -> Option<&OsStr> {
        let looks_like_option = self.flag.as_encoded_bytes().starts_with(b"-");
        (!looks_like_option && !self.flag.is_empty()).then_some(&self.flag)
    }

    /// Returns the value, if there is one.
    pub fn value(&self) -> Option<&OsStr> {
        self.value.as_deref()
    }

    /// Returns the value, if there is one and it is UTF-8.
    pub fn value_str(&self) -> Option<&str> {
        self.value.as_deref().and_then(OsStr::to_str)
    }

    /// Returns the value if the option's name is `name` and the value is UTF-8.
    pub fn value_str_of(&self, name: &str) -> Option<&str> {
        self.value_str().filter(|_| self.name() == Some(name))
    }

    /// Returns the words of the argument.
    pub fn into_words(self) -> impl Iterator<Item = OsString> {
        std::iter::once(self.flag).chain(self.value)
    }
}

/// QEMU accepts one dash or two.
fn option_name(word: &OsStr) -> Option<&str> {
    let name = word.to_str()?.strip_prefix('-')?;
    let name = name.strip_prefix('-').unwrap_or(name);
    (!name.is_empty()).then_some(name)
}

/// Splits the words after the program's name into arguments.
pub fn split(words: &[OsString]) -> Vec<Argument> {
    let mut arguments = Vec::new();
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        let value = match (option_name(word), words.peek()) {
            (Some(name), Some(next)) if takes_value(name, &next.to_string_lossy()) => words.next().cloned(),
            _ => None,
        };
        arguments.push(Argument { flag: word.clone(), value });
    }
    arguments
}

/// Joins arguments to words again.
pub fn join(arguments: impl IntoIterator<Item = Argument>) -> Vec<OsString> {
    arguments.into_iter().flat_map(Argument::into_words).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split_whitespace().map(Into::into).collect()
    }

    fn names(text: &str) -> Vec<String> {
        let names = split(&words(text));
        names.iter().map(|argument| argument.name().unwrap_or("").to_owned()).collect()
    }

    #[test]
    fn options_are_paired_with_their_values() {
        assert_eq!(names("-m 512 --nographic -drive file=a"), ["m", "nographic", "drive"]);
        assert_eq!(names("-append -drive -S disk.img"), ["append", "S", ""]);
        assert_eq!(names("-new-flag -new-option 1 -s -"), ["new-flag", "new-option", "s", ""]);
        assert_eq!(names("-drive"), ["drive"]);
    }

    proptest! {
        #[test]
        fn split_and_join_preserve_all_words(line in prop::collection::vec("-{0,2}[a-zA-Z]{0,6}|-m|-drive|.{0,5}", 0..12)) {
            let line: Vec<OsString> = line.into_iter().map(Into::into).collect();
            prop_assert_eq!(join(split(&line)), line);
        }
    }
}
