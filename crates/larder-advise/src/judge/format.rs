//! Formatting of numbers in sentences.

/// Formats a share as `12.5 %`, with as many digits as are useful.
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    match percent {
        _ if percent == 0.0 => "0 %".to_owned(),
        _ if percent < 9.95 => format!("{percent:.1} %"),
        _ => format!("{percent:.0} %"),
    }
}

/// Formats bytes as `1.5 GiB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let text = match value {
        _ if value >= 99.95 || value.fract() == 0.0 => format!("{value:.0}"),
        _ => format!("{value:.1}"),
    };
    format!("{} {}", text.strip_suffix(".0").unwrap_or(&text), UNITS[unit])
}

/// Formats seconds as `1.5 ms`.
pub fn time(seconds: f64) -> String {
    match seconds {
        _ if seconds >= 0.9995 => format!("{seconds:.1} s"),
        _ if seconds >= 0.009_95 => format!("{:.0} ms", seconds * 1e3),
        _ if seconds >= 0.000_999_5 => format!("{:.1} ms", seconds * 1e3),
        _ => format!("{:.0} us", seconds * 1e6),
    }
}

/// Formats a count with its noun: `1 vCPU`, `2 vCPUs`.
pub(super) fn count(number: impl Into<u64>, noun: &str) -> String {
    match number.into() {
        1 => format!("1 {noun}"),
        number => format!("{number} {noun}s"),
    }
}

/// Formats a rate per second.
pub(super) fn rate(per_second: f64) -> String {
    match per_second {
        _ if per_second < 9.95 => format!("{per_second:.1}/s"),
        _ => format!("{per_second:.0}/s"),
    }
}

/// Formats a number of CPUs: `0.3`.
pub(super) fn cpus(used: f64) -> String {
    match used {
        _ if used < 0.095 => format!("{used:.2}"),
        _ => format!("{used:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_useful_digits() {
        let shares =
            [(0.0, "0 %"), (0.0004, "0.0 %"), (0.05, "5.0 %"), (0.0999, "10 %"), (0.333, "33 %"), (1.0, "100 %")];
        for (share, text) in shares {
            assert_eq!(percent(share), text);
        }
        let sizes =
            [(0, "0 KiB"), (512 << 20, "512 MiB"), (3 << 29, "1.5 GiB"), (1 << 30, "1 GiB"), (1023 << 20, "1 GiB")];
        for (bytes, text) in sizes {
            assert_eq!(size(bytes), text);
        }
        let times = [(0.00005, "50 us"), (0.0029, "2.9 ms"), (0.045, "45 ms"), (1.5, "1.5 s")];
        for (seconds, text) in times {
            assert_eq!(time(seconds), text);
        }
        assert_eq!((count(1_u32, "vCPU"), count(4_u32, "vCPU")), ("1 vCPU".into(), "4 vCPUs".into()));
    }
}
