//! Identification of the guest RAM in QEMU's shared memory, by QEMU's command line.
//!
//! Any program can map a file with a path at any time, and a program that maps managed memory finds zeros in place of
//! evicted pages. So only those files count that the command line uses as guest RAM. Shared memory of other devices
//! (ivshmem), disks in memory (nvdimm, virtio-pmem), and backends of unknown use are excluded. A backend that was
//! added later, by QMP, is of unknown use.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use larder_memory::target::RamFiles;
use rustix::process::Pid;

use crate::run::keyval::KeyValues;

/// Name of the memfds of memory-backend-memfd.
const BACKEND_MEMFD: &str = "memory-backend-memfd";

/// Returns the files that process `pid` uses as guest RAM; `None` if it is not QEMU, or its command line is
/// incomplete.
pub(super) fn ram_files(pid: Pid) -> Option<RamFiles> {
    let pid = pid.as_raw_pid();
    let program = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    if !program.file_name()?.as_bytes().starts_with(b"qemu") {
        return None;
    }
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<String> =
        line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    let ram = RamOptions::parse(&words)?;
    let is_daemonized = words.iter().any(|word| word.trim_start_matches('-') == "daemonize");
    let identity = |path: &PathBuf| {
        // The path is resolved in QEMU's mount namespace.
        let visible_path = match path.strip_prefix("/") {
            Ok(relative) => Path::new(&format!("/proc/{pid}/root")).join(relative),
            // QEMU opened the file before it changed to the root directory.
            Err(_) if is_daemonized => {
                return find_mapping(&fs::read_to_string(format!("/proc/{pid}/maps")).ok()?, path);
            }
            Err(_) => Path::new(&format!("/proc/{pid}/cwd")).join(path),
        };
        let found = fs::metadata(visible_path).ok()?;
        Some((found.dev(), found.ino()))
    };
    Some(RamFiles {
        named: ram.paths.iter().filter_map(identity).collect(),
        memfd: ram.has_ivshmem_server.then_some(BACKEND_MEMFD),
    })
}

/// Returns the only file among shared mappings (proc_pid_maps(5)) whose path ends with the relative path `end`.
fn find_mapping(maps: &str, end: &Path) -> Option<(u64, u64)> {
    let end = end.strip_prefix(".").unwrap_or(end);
    let identity = |line: &str| {
        let mut fields = line.splitn(6, ' ');
        let permissions = fields.nth(1)?;
        let (major, minor) = fields.nth(1)?.split_once(':')?;
        let inode = fields.next()?.parse().ok()?;
        let path = Path::new(fields.next()?.trim_start());
        let hex = |text| u32::from_str_radix(text, 16).ok();
        let device = rustix::fs::makedev(hex(major)?, hex(minor)?);
        (permissions.ends_with('s') && path.ends_with(end)).then_some((device, inode))
    };
    let mut matches = maps.lines().filter_map(identity);
    let file = matches.next()?;
    matches.all(|other| other == file).then_some(file)
}

/// Memory options of a command line.
#[derive(PartialEq, Eq, Default, Debug)]
struct RamOptions {
    /// Paths of files that are guest RAM.
    paths: Vec<PathBuf>,
    /// An ivshmem server provides shared memory.
    has_ivshmem_server: bool,
}

impl RamOptions {
    /// Parses a command line; `None` if a part of it is in a file (-readconfig).
    fn parse(words: &[String]) -> Option<Self> {
        let mut ram = Self::default();
        let mut backends: Vec<(String, PathBuf)> = Vec::new();
        let mut used: Vec<String> = Vec::new();
        for pair in words.windows(2) {
            let Some(option) = pair[0].strip_prefix('-') else {
                continue;
            };
            let value = pair[1].as_str();
            let read = |implied| match value.starts_with('{') {
                true => KeyValues::parse_json(value).unwrap_or_default(),
                false => KeyValues::parse(value, Some(implied)),
            };
            let mut uses = |values: &KeyValues, key| used.extend(values.get(key).map(str::to_owned));
            match option.strip_prefix('-').unwrap_or(option) {
                "readconfig" => return None,
                "mem-path" => ram.paths.push(value.into()),
                "machine" | "M" => uses(&read("type"), "memory-backend"),
                "numa" => uses(&read("type"), "memdev"),
                "object" => {
                    let object = read("qom-type");
                    if let (Some(id), Some(path)) = (object.get("id"), object.get("mem-path")) {
                        backends.push((id.to_owned(), path.into()));
                    }
                }
                "device" => {
                    let device = read("driver");
                    match device.get("driver").unwrap_or_default() {
                        "ivshmem-doorbell" | "ivshmem" => ram.has_ivshmem_server = true,
                        driver if driver == "pc-dimm" || driver.starts_with("virtio-mem") => uses(&device, "memdev"),
                        _ => {}
                    }
                }
                _ => {}
            }
        }
        let is_used = |id: &String| used.contains(id);
        let paths = backends.into_iter().filter(|(id, _)| is_used(id)).map(|(_, path)| path);
        ram.paths.extend(paths);
        Some(ram)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ram_of(line: &str) -> Option<RamOptions> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        RamOptions::parse(&words)
    }

    fn paths_of(line: &str) -> Vec<String> {
        let ram = ram_of(line).expect("all is said");
        assert!(!ram.has_ivshmem_server);
        ram.paths.iter().map(|path| path.display().to_string()).collect()
    }

    #[test]
    fn only_backends_used_as_ram_count() {
        let file = |id: &str| format!("-object memory-backend-file,id={id},size=1G,share=on,mem-path=/dev/shm/{id}");
        let both = format!("qemu {} {}", file("m"), file("iv"));
        for (words, wanted) in [
            ("-machine q35,memory-backend=m -device ivshmem-plain,memdev=iv", &["/dev/shm/m"][..]),
            ("--numa node,nodeid=0,memdev=m -device nvdimm,memdev=iv", &["/dev/shm/m"]),
            ("-numa node,memdev=m -device pc-dimm,id=d,memdev=iv", &["/dev/shm/m", "/dev/shm/iv"]),
            ("-device virtio-mem-pci,memdev=iv", &["/dev/shm/iv"]),
            ("-M pc -device virtio-pmem-pci,memdev=iv", &[]),
            ("-mem-path /dev/shm/all", &["/dev/shm/all"]),
        ] {
            assert_eq!(paths_of(&format!("{both} {words}")), wanted, "{words}");
        }
    }

    /// libvirt writes options in this form.
    #[test]
    fn json_options_are_parsed() {
        let object = |id: &str| {
            format!(
                r#"-object {{"qom-type":"memory-backend-file","id":"{id}","mem-path":"/dev/shm/{id}","share":true}}"#
            )
        };
        let line = format!(
            r#"qemu {} {} -machine pc-q35,memory-backend=pc.ram -device {{"driver":"ivshmem-plain","id":"s","memdev":"shmmem-s"}}"#,
            object("pc.ram"),
            object("shmmem-s")
        );
        assert_eq!(paths_of(&line), ["/dev/shm/pc.ram"]);
    }

    /// After -daemonize, QEMU has another working directory than when it opened the file.
    #[test]
    fn relative_path_is_found_among_mappings() {
        let maps = "7f00-8000 rw-s 00000000 00:1c 77      /dev/shm/a vm/ram\n\
            8000-9000 rw-s 00100000 00:1c 77      /dev/shm/a vm/ram\n\
            9000-a000 rw-p 00000000 fe:01 78      /other/ram\n\
            a000-b000 rw-s 00000000 00:1c 79      /dev/shm/one/disk\n\
            b000-c000 rw-s 00000000 00:1c 80      /dev/shm/two/disk\n";
        let ram = Some((rustix::fs::makedev(0, 0x1c), 77));
        assert_eq!(find_mapping(maps, Path::new("ram")), ram);
        assert_eq!(find_mapping(maps, Path::new("./a vm/ram")), ram);
        assert_eq!(find_mapping(maps, Path::new("disk")), None);
        assert_eq!(find_mapping(maps, Path::new("am")), None);
    }

    #[test]
    fn ivshmem_server_and_readconfig_are_detected() {
        let ram = ram_of("qemu -device ivshmem-doorbell,chardev=c").expect("all is said");
        assert!(ram.has_ivshmem_server);
        assert_eq!(ram_of("qemu -readconfig /etc/vm.cfg"), None);
    }
}
