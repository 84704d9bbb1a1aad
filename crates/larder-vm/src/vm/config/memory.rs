//! The section `[memory]` of a VM's file, which `larder memory attach --vm` applies. The server of the disks only
//! checks it.

use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::{ConfigParser, VM_KEYS, Value, parse_image, parse_socket_path, resolve_path};
use crate::disk_spec::keys::{self, OptionProblem, nearest};
use crate::image::ImageAddress;
use crate::memory::spec::{KEYS, MemorySpec, MemorySpecParser};

/// Keys of memory in addition to [`KEYS`].
const QEMU_LOCATION_KEYS: [&str; 2] = ["qmp", "pid-file"];

/// Memory options of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmMemory {
    /// Options of the pager.
    pub spec: MemorySpec,
    /// Location of the VM's QEMU.
    pub qemu: QemuLocation,
}

/// Location of a VM's QEMU while it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QemuLocation {
    /// QEMU listens on this QMP socket.
    Qmp(PathBuf),
    /// This file has the process ID.
    PidFile(PathBuf),
}

impl std::fmt::Display for QemuLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Qmp(path) => write!(f, "QMP socket {}", path.display()),
            Self::PidFile(path) => write!(f, "pid file {}", path.display()),
        }
    }
}

/// Returns whether a key belongs to memory.
pub(super) fn is_memory_key(key: &str) -> bool {
    KEYS.into_iter().chain(QEMU_LOCATION_KEYS).any(|known| known == key)
}

impl ConfigParser<'_> {
    pub(super) fn parse_memory(&mut self, value: &Value<'_>) -> Option<VmMemory> {
        let DeValue::Table(table) = value.get_ref() else {
            let what = "memory: write a line [memory], and its keys below it, as in budget = \"1GiB\"";
            self.add_mistake(&value.span(), what);
            return None;
        };
        let before = self.mistakes.len();
        let (mut parser, mut qmp, mut pid_file) = (MemorySpecParser::default(), None, None);
        let directory = self.directory();
        for (key, value) in table {
            let (at, key) = (key.span(), key.get_ref().as_ref());
            match key {
                "qmp" => qmp = self.parse_value(key, value, |text| parse_socket_path(&directory, text)),
                "pid-file" => pid_file = self.parse_value(key, value, |text| resolve_path(&directory, text)),
                _ => {
                    let Some(text) = self.parse_value(key, value, |text| resolve_value(&directory, key, text)) else {
                        continue;
                    };
                    match parser.set(key, &text) {
                        Ok(()) => {}
                        Err(OptionProblem::InvalidValue(wanted)) => {
                            self.add_mistake(&value.span(), format!("{key} = {text}: {wanted}"))
                        }
                        Err(OptionProblem::UnknownKey) => {
                            self.add_mistake(&at, format!("unknown key '{key}'{}", unknown_key_hint(key)))
                        }
                    }
                }
            }
        }
        // A key with an invalid value must not be reported as missing as well.
        if self.mistakes.len() > before {
            return None;
        }
        let spec = match parser.finish() {
            Ok(spec) => Some(spec),
            Err(why) => {
                self.add_mistake(&value.span(), format!("memory: {why}"));
                None
            }
        };
        let qemu = match (qmp, pid_file) {
            (Some(path), None) => Some(QemuLocation::Qmp(path)),
            (None, Some(path)) => Some(QemuLocation::PidFile(path)),
            (both, _) => {
                let what = match both {
                    Some(_) => "memory: QEMU is located by either qmp or pid-file: omit one of them",
                    None => {
                        "memory: it does not give the location of QEMU; add qmp = \"/path/of/its/QMP/socket\", or pid-file = \"/path/of/its/pid/file\""
                    }
                };
                self.add_mistake(&value.span(), what);
                None
            }
        };
        Some(VmMemory { spec: spec?, qemu: qemu? })
    }
}

/// Returns a hint about an unknown key.
fn unknown_key_hint(key: &str) -> String {
    match nearest(key, KEYS.into_iter().chain(QEMU_LOCATION_KEYS)) {
        _ if VM_KEYS.contains(&key) => "; it is a key of the VM: write it above [memory]".to_owned(),
        near if !near.is_empty() => near,
        _ if keys::names().any(|known| known == key) => "; it is a key of a disk: write it below [[disk]]".to_owned(),
        _ => {
            let known: Vec<&str> = KEYS.into_iter().chain(QEMU_LOCATION_KEYS).collect();
            format!("; the memory has {}", known.join(", "))
        }
    }
}

/// Returns a value for [`MemorySpecParser::set`]; a relative path becomes relative to the file's directory.
fn resolve_value(directory: &Path, key: &str, text: &str) -> Result<String, String> {
    match key {
        "swap-cache" | "slow-store" if text.is_empty() => Err("give a path or an NBD URI".to_owned()),
        "swap-cache" | "slow-store" => Ok(match parse_image(directory, text)? {
            ImageAddress::Path(path) => path.display().to_string(),
            ImageAddress::Nbd(_) => text.to_owned(),
        }),
        _ => Ok(text.to_owned()),
    }
}

/// Returns whether the file has a section for memory, valid or not.
pub(super) fn has_memory_section(table: &DeTable<'_>) -> bool {
    table.contains_key("memory")
}
