//! Quoting of commands for a POSIX shell.

use std::ffi::{OsStr, OsString};

/// Joins the words, quoting those that a shell would split or change.
pub fn command_line(words: &[OsString]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| quote(word)).collect();
    quoted.join(" ")
}

fn quote(word: &OsStr) -> String {
    let Some(word) = word.to_str() else {
        let octal: String = word.as_encoded_bytes().iter().map(|byte| format!("\\{byte:03o}")).collect();
        return format!("\"$(printf '{octal}')\"");
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,=+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_utf8_word_survives_shell_quoting() {
        let word = std::os::unix::ffi::OsStringExt::from_vec(b"/a b\xff%'c".to_vec());
        let line = command_line(&[word]);
        let output =
            std::process::Command::new("sh").args(["-c", &format!("printf %s {line}")]).output().expect("a shell");
        assert_eq!(output.stdout, b"/a b\xff%'c");
    }

    #[test]
    fn quoted_words_survive_a_shell() {
        let words = ["qemu", "", "a b", "it's", "$HOME", "x=1,y=/tmp/a.raw", "*", "é", "a\nb"];
        let line = command_line(&words.map(OsString::from));
        let output =
            std::process::Command::new("sh").args(["-c", &format!("printf '%s\\0' {line}")]).output().expect("a shell");
        let read: Vec<&[u8]> = output.stdout.split(|byte| *byte == 0).collect();
        assert_eq!(read[..words.len()], words.map(str::as_bytes));
        assert!(line.starts_with("qemu '' 'a b'"), "{line}");
    }
}
