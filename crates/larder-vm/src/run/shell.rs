//! A command as a line for a POSIX shell.

use std::ffi::OsString;

/// The words quoted where a shell would take them apart or change them.
pub fn command_line(words: &[OsString]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| quote(&word.to_string_lossy())).collect();
    quoted.join(" ")
}

fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,=+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_the_same_words_back() {
        let words = ["qemu", "", "a b", "it's", "$HOME", "x=1,y=/tmp/a.raw", "*", "é", "a\nb"];
        let line = command_line(&words.map(OsString::from));
        let output = std::process::Command::new("sh")
            .args(["-c", &format!("printf '%s\\0' {line}")])
            .output()
            .expect("a shell");
        let read: Vec<&[u8]> = output.stdout.split(|byte| *byte == 0).collect();
        assert_eq!(read[..words.len()], words.map(str::as_bytes));
        assert!(line.starts_with("qemu '' 'a b'"), "{line}");
    }
}
