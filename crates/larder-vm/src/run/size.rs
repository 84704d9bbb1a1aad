//! Sizes in QEMU's notation: `512`, `2G`, `1.5g`, `0x1000`.

/// Parses a size in bytes; a number without a suffix is in units of `unit` bytes. `None` if QEMU would refuse it too.
pub fn parse_size(text: &str, unit: u64) -> Option<u64> {
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return u64::from_str_radix(hex, 16).ok()?.checked_mul(unit);
    }
    let number_len = text.trim_end_matches(|c: char| c.is_ascii_alphabetic()).len();
    let (number, suffix) = text.split_at(number_len);
    let factor = match suffix.to_ascii_lowercase().as_str() {
        "" => unit,
        "b" => 1,
        "k" => 1 << 10,
        "m" => 1 << 20,
        "g" => 1 << 30,
        "t" => 1 << 40,
        "p" => 1 << 50,
        "e" => 1 << 60,
        _ => return None,
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor);
    }
    let (whole, fraction) = number.split_once('.')?;
    let digits = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    if !digits(whole) || !digits(fraction) || number.len() > 16 {
        return None;
    }
    let bytes = number.parse::<f64>().ok()? * factor as f64;
    (bytes < u64::MAX as f64).then_some(bytes as u64)
}

/// Parses a whole number of a device's property, in decimal or after `0x`. `None` if QEMU would read it differently
/// (as octal, after a zero), or refuse it.
pub fn parse_number(text: &str) -> Option<u64> {
    let digits_of = |digits: &str, radix| {
        let is_number = digits.chars().all(|digit| digit.is_digit(radix));
        is_number.then(|| u64::from_str_radix(digits, radix).ok()).flatten()
    };
    match (text.strip_prefix("0x"), text.strip_prefix('0')) {
        (Some(hex), _) => digits_of(hex, 16),
        (None, None | Some("")) => digits_of(text, 10),
        (None, Some(_)) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn sizes_are_parsed_as_in_qemu() {
        assert_eq!(parse_size("512", MIB), Some(512 * MIB));
        assert_eq!(parse_size("2G", MIB), Some(2048 * MIB));
        assert_eq!(parse_size("1.5g", MIB), Some(1536 * MIB));
        assert_eq!(parse_size("4096", 1), Some(4096));
        assert_eq!(parse_size("65536k", MIB), Some(64 * MIB));
        assert_eq!(parse_size("100b", MIB), Some(100));
        assert_eq!(parse_size("0x10", MIB), Some(16 * MIB));
    }

    #[test]
    fn numbers_are_parsed_as_in_qemu() {
        for (text, number) in [
            ("0", Some(0)),
            ("64", Some(64)),
            ("0x40", Some(64)),
            ("010", None),
            ("+1", None),
            ("0x+1", None),
            ("0x", None),
            ("", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(parse_number(text), number, "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_refused() {
        for text in ["", "G", "-1", "1.2.3", "1Gi", "99999999999999999999", "20000000T", "1e9", "NaN", "inf", "é"] {
            assert_eq!(parse_size(text, MIB), None, "{text}");
        }
    }
}
