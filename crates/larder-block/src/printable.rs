//! Text from outside (an image, a peer, another host), made safe to print.
//!
//! A terminal interprets control characters as commands, and a line break inside a name looks like another line of
//! output. Both are escaped as in JSON (`\u001b`), so JSON with such a character left in it stays JSON.

/// Returns `text` on one line, with control characters and characters that change the direction of writing escaped.
pub fn printable(text: &str) -> String {
    escape(text, |_| false)
}

/// Returns `text` escaped like [`printable`], but with its line breaks and tabs kept.
pub fn printable_lines(text: &str) -> String {
    escape(text, |letter| matches!(letter, '\n' | '\t'))
}

fn escape(text: &str, keep: impl Fn(char) -> bool) -> String {
    let mut output = String::with_capacity(text.len());
    for letter in text.chars() {
        // Unicode, "Bidirectional Algorithm": embeddings, overrides and isolates; and the two line separators.
        let is_bidi_control = matches!(letter, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        let is_line_separator = matches!(letter, '\u{2028}' | '\u{2029}');
        match (letter.is_control() || is_bidi_control || is_line_separator) && !keep(letter) {
            // All of these characters fit in 16 bits.
            true => output.push_str(&format!("\\u{:04x}", u32::from(letter))),
            false => output.push(letter),
        }
    }
    output
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        for (text, escaped) in [
            ("plain \u{e9}", "plain \u{e9}"),
            ("\u{1b}[2J", r"\u001b[2J"),
            ("a\nb\tc\0", r"a\u000ab\u0009c\u0000"),
            ("\u{7f}\u{9b}\u{202e}\u{2028}", r"\u007f\u009b\u202e\u2028"),
        ] {
            assert_eq!(printable(text), escaped);
        }
        assert_eq!(printable_lines("a\nb\tc\r"), "a\nb\tc\\u000d");
    }
}
