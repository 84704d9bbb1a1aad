//! The section `[memory]` of a VM's file, which `larder memory attach --vm` applies. The server of the disks only
//! checks it.

use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::{Reader, VM_KEYS, Value, image_of, path_beside, socket_of};
use crate::image::ImageAddress;
use crate::memory::wish::{KEYS, MemoryWish, Said};
use crate::wish::keys::{self, Problem, nearest};

/// Keys of memory in addition to [`KEYS`].
const FOUND_BY: [&str; 2] = ["qmp", "pid-file"];

/// Memory options of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmMemory {
    /// Options of the pager.
    pub wish: MemoryWish,
    /// Location of the VM's QEMU.
    pub qemu: QemuAt,
}

/// Location of a VM's QEMU while it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QemuAt {
    /// QEMU listens on this QMP socket.
    Qmp(PathBuf),
    /// This file has the process ID.
    PidFile(PathBuf),
}

impl std::fmt::Display for QemuAt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Qmp(path) => write!(f, "QMP socket {}", path.display()),
            Self::PidFile(path) => write!(f, "pid file {}", path.display()),
        }
    }
}

/// Returns whether a key belongs to memory.
pub(super) fn is_key(key: &str) -> bool {
    KEYS.into_iter().chain(FOUND_BY).any(|known| known == key)
}

impl Reader<'_> {
    pub(super) fn memory(&mut self, value: &Value<'_>) -> Option<VmMemory> {
        let DeValue::Table(table) = value.get_ref() else {
            let what = "memory: write a line [memory], and its keys below it, as in budget = \"1GiB\"";
            self.mistake(&value.span(), what);
            return None;
        };
        let before = self.mistakes.len();
        let (mut said, mut qmp, mut pid_file) = (Said::default(), None, None);
        let folder = self.folder();
        for (key, value) in table {
            let (at, key) = (key.span(), key.get_ref().as_ref());
            match key {
                "qmp" => qmp = self.read(key, value, |text| socket_of(&folder, text)),
                "pid-file" => pid_file = self.read(key, value, |text| path_beside(&folder, text)),
                _ => {
                    let Some(text) = self.read(key, value, |text| value_beside(&folder, key, text)) else {
                        continue;
                    };
                    match said.set(key, &text) {
                        Ok(()) => {}
                        Err(Problem::Wanted(wanted)) => {
                            self.mistake(&value.span(), format!("{key} = {text}: {wanted}"))
                        }
                        Err(Problem::UnknownKey) => self.mistake(&at, format!("unknown key '{key}'{}", hint(key))),
                    }
                }
            }
        }
        // A key with an invalid value must not be reported as missing as well.
        if self.mistakes.len() > before {
            return None;
        }
        let wish = match said.wish() {
            Ok(wish) => Some(wish),
            Err(why) => {
                self.mistake(&value.span(), format!("memory: {why}"));
                None
            }
        };
        let qemu = match (qmp, pid_file) {
            (Some(path), None) => Some(QemuAt::Qmp(path)),
            (None, Some(path)) => Some(QemuAt::PidFile(path)),
            (given, _) => {
                let what = match given {
                    Some(_) => "memory: QEMU is located by either qmp or pid-file: omit one of them",
                    None => {
                        "memory: it does not give the location of QEMU; add qmp = \"/path/of/its/QMP/socket\", or pid-file = \"/path/of/its/pid/file\""
                    }
                };
                self.mistake(&value.span(), what);
                None
            }
        };
        Some(VmMemory {
            wish: wish?,
            qemu: qemu?,
        })
    }
}

/// Returns a hint about an unknown key.
fn hint(key: &str) -> String {
    match nearest(key, KEYS.into_iter().chain(FOUND_BY)) {
        _ if VM_KEYS.contains(&key) => "; it is a key of the VM: write it above [memory]".to_owned(),
        near if !near.is_empty() => near,
        _ if keys::names().any(|known| known == key) => "; it is a key of a disk: write it below [[disk]]".to_owned(),
        _ => {
            let known: Vec<&str> = KEYS.into_iter().chain(FOUND_BY).collect();
            format!("; the memory has {}", known.join(", "))
        }
    }
}

/// Returns a value for [`Said::set`]; a relative path becomes relative to the file's directory.
fn value_beside(folder: &Path, key: &str, text: &str) -> Result<String, String> {
    match key {
        "swap-cache" | "slow-store" if text.is_empty() => Err("give a path or an NBD URI".to_owned()),
        "swap-cache" | "slow-store" => Ok(match image_of(folder, text)? {
            ImageAddress::Path(path) => path.display().to_string(),
            ImageAddress::Nbd(_) => text.to_owned(),
        }),
        _ => Ok(text.to_owned()),
    }
}

/// Returns whether the file has a section for memory, valid or not.
pub(super) fn is_in(table: &DeTable<'_>) -> bool {
    table.contains_key("memory")
}
