//! What a QEMU process is, by its command line and its threads' names.

use std::ffi::OsString;
use std::path::Path;

use larder_vm::run::arguments::{Argument, split};
use larder_vm::run::keyval::{KeyValues, parse_bool};
use larder_vm::run::size::parse_size;

const MIB: u64 = 1 << 20;

/// What QEMU gives a guest that is not told otherwise.
const RAM_DEFAULT: u64 = 128 * MIB;

/// What QEMU calls its threads begins so, with `debug-threads=on`.
const VCPU_THREAD: &str = "CPU ";
/// That of all vCPUs together, where they take turns (TCG with `thread=single`).
const ALL_VCPUS_THREAD: &str = "ALL CPUs/";

/// Whether a program of that name runs a VM: `qemu-system-x86_64`, and what distributions call it besides.
pub(crate) fn is_qemu(program: &str) -> bool {
    program.starts_with("qemu-system-") || ["qemu-kvm", "kvm"].contains(&program)
}

/// The file name of a command's program.
pub(crate) fn program(words: &[OsString]) -> Option<String> {
    let name = Path::new(words.first()?).file_name()?;
    Some(name.to_string_lossy().into_owned())
}

/// Whether a thread is a vCPU's, or that of all of them.
pub(crate) fn is_vcpu(thread: &str) -> bool {
    let number = thread.strip_prefix(VCPU_THREAD).and_then(|rest| rest.split_once('/'));
    number.is_some_and(|(number, _)| number.parse::<u32>().is_ok()) || is_all_vcpus(thread)
}

/// Whether a thread is that of all vCPUs together.
pub(crate) fn is_all_vcpus(thread: &str) -> bool {
    thread.starts_with(ALL_VCPUS_THREAD)
}

/// A vCPU's number by the name of its thread, to put them in order.
pub(crate) fn vcpu_number(thread: &str) -> Option<u32> {
    thread.strip_prefix(VCPU_THREAD)?.split('/').next()?.parse().ok()
}

/// What a command line says of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Described {
    /// Its name, if it has one.
    pub(crate) name: Option<String>,
    /// Its RAM in bytes when it was started, if that is said here and not in another file.
    pub(crate) ram: Option<u64>,
    /// It may have got more since: up to so much.
    pub(crate) ram_max: Option<u64>,
    /// Its vCPUs when it was started.
    pub(crate) vcpus: Option<u32>,
    /// Everything, for finding paths in it.
    words: Vec<String>,
}

impl Described {
    /// By the words of a command, the program's name included.
    pub(crate) fn by(words: &[OsString]) -> Self {
        let arguments = split(words.get(1..).unwrap_or_default());
        let of = |name: &str, implied| {
            let given = arguments
                .iter()
                .rev()
                .find_map(|argument: &Argument| argument.text_of(name));
            given.map(|text| KeyValues::parse(text, Some(implied)))
        };
        // It may say everything, and later options add to it.
        let is_elsewhere = arguments.iter().any(|argument| argument.name() == Some("readconfig"));
        let memory = of("m", "size");
        let size = |key: &str| memory.as_ref().and_then(|memory| parse_size(memory.get(key)?, MIB));
        let ram = match &memory {
            Some(memory) if memory.get("size").is_some() => size("size"),
            _ => (!is_elsewhere).then_some(RAM_DEFAULT),
        };
        Self {
            name: of("name", "guest").and_then(|name| name.get("guest").map(printable)),
            ram,
            ram_max: size("maxmem").filter(|max| ram.is_some_and(|ram| *max > ram)),
            vcpus: match of("smp", "cpus") {
                Some(smp) => vcpus(&smp),
                None => (!is_elsewhere).then_some(1),
            },
            words: words.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
        }
    }

    /// Whether the command line has this path, or address.
    pub(crate) fn names(&self, path: &str) -> bool {
        !path.is_empty() && self.words.iter().any(|word| has_whole(word, path))
    }

    /// Whether QEMU was told to name its threads.
    pub(crate) fn names_threads(&self) -> bool {
        let mut words = self.words.iter();
        words.any(|word| {
            let list = KeyValues::parse(word, Some("guest"));
            list.get("debug-threads").and_then(parse_bool) == Some(true)
        })
    }
}

/// Whether `path` is in `word`, and no part of a longer one.
fn has_whole(word: &str, path: &str) -> bool {
    word.match_indices(path).any(|(at, _)| {
        let before = word[..at].chars().next_back();
        let behind = word[at + path.len()..].chars().next();
        before.is_none_or(|before| "=,:\"".contains(before)) && behind.is_none_or(|behind| ",\"".contains(behind))
    })
}

/// `cpus`, or what the parts of a topology make; a part that is not given is 1.
fn vcpus(smp: &KeyValues) -> Option<u32> {
    let of = |key: &str| smp.get(key).map(str::parse::<u32>);
    match of("cpus") {
        Some(cpus) => cpus.ok(),
        None => [
            "drawers", "books", "sockets", "dies", "clusters", "modules", "cores", "threads",
        ]
        .iter()
        .filter_map(|key| of(key))
        .try_fold(1_u32, |all, part| all.checked_mul(part.ok()?)),
    }
}

/// Without what would change a terminal.
pub(crate) fn printable(text: &str) -> String {
    let fit = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    text.chars().map(fit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(line: &str) -> Described {
        let words: Vec<OsString> = line.split(' ').map(Into::into).collect();
        Described::by(&words)
    }

    #[test]
    fn a_vm_is_what_its_command_line_says() {
        let cases = [
            ("q -name web -m 4G -smp 4", (Some("web"), Some(4096 * MIB), Some(4))),
            (
                "q -name guest=web,debug-threads=on -m 512",
                (Some("web"), Some(512 * MIB), Some(1)),
            ),
            (
                "q -m size=2G,slots=4,maxmem=8G -smp sockets=2,cores=3,threads=2",
                (None, Some(2048 * MIB), Some(12)),
            ),
            ("q -m 1G -m 2G -smp 2,maxcpus=8", (None, Some(2048 * MIB), Some(2))),
            ("q -m 1G -smp cpus=3,sockets=3", (None, Some(1024 * MIB), Some(3))),
            ("q", (None, Some(128 * MIB), Some(1))),
            ("q -readconfig vm.cfg", (None, None, None)),
            ("q -m much -smp many", (None, None, None)),
            ("q -smp cores=100000,threads=100000", (None, Some(128 * MIB), None)),
        ];
        for (line, (name, ram, vcpus)) in cases {
            let it = described(line);
            assert_eq!((it.name.as_deref(), it.ram, it.vcpus), (name, ram, vcpus), "{line}");
        }
        assert_eq!(described("q -m 2G,maxmem=8G").ram_max, Some(8192 * MIB));
        assert_eq!(described("q -m 2G,maxmem=2G").ram_max, None);
        assert_eq!(described("q -name a\x1b[2Jb").name.as_deref(), Some("a\u{fffd}[2Jb"));
        assert!(described("q -name guest=a,debug-threads=on").names_threads());
        assert!(!described("q -name guest=a,debug-threads=off").names_threads());
    }

    #[test]
    fn threads_are_vcpus_by_their_names() {
        for name in ["CPU 0/KVM", "CPU 127/TCG", "ALL CPUs/TCG"] {
            assert!(is_vcpu(name), "{name}");
        }
        for name in [
            "CPU x/KVM",
            "CPU 0",
            "CPU",
            "qemu-system-x86",
            "IO iothread0",
            "vhost-1",
            "call_rcu",
        ] {
            assert!(!is_vcpu(name), "{name}");
        }
        assert_eq!(vcpu_number("CPU 12/KVM"), Some(12));
    }

    #[test]
    fn a_path_is_found_whole() {
        let it = described("q -chardev socket,id=c,path=/run/a.sock -drive file=nbd+unix:///x?socket=/run/b,if=virtio");
        assert!(it.names("/run/a.sock") && it.names("nbd+unix:///x?socket=/run/b"));
        assert!(!it.names("/run/a") && !it.names("a.sock") && !it.names(""));
    }

    #[test]
    fn qemu_has_some_names() {
        for name in ["qemu-system-x86_64", "qemu-system-aarch64", "qemu-kvm", "kvm"] {
            assert!(is_qemu(name), "{name}");
        }
        for name in ["qemu-img", "qemu-nbd", "sh", "qemu"] {
            assert!(!is_qemu(name), "{name}");
        }
    }
}
