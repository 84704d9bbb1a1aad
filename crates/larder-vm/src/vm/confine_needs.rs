//! Resources that a VM's process needs after it is confined.

use super::config::VmConfig;
use crate::confine::Needs;
use crate::image::{ChainPolicy, ImageAddress};
use crate::private_directory;

/// Returns the needs of the process that serves `config`.
pub(super) fn for_config(config: &VmConfig) -> Needs {
    let mut needs = Needs::default();
    for disk in &config.disks {
        let spec = &disk.spec;
        let mut connect = |address: &ImageAddress| {
            if let ImageAddress::Nbd(uri) = address {
                needs.add_nbd_server(&uri.address);
            }
        };
        connect(&spec.image);
        spec.disk_cache.file.iter().for_each(&mut connect);
        if let ChainPolicy::Pinned { chain, .. } = &spec.chain {
            chain.data_file.iter().for_each(&mut connect);
            for image in &chain.backing {
                connect(&image.image);
                image.data_file.iter().for_each(&mut connect);
            }
        }
    }
    for directory in [private_directory::runtime(), private_directory::state()].into_iter().flatten() {
        needs.add_directory(directory);
    }
    needs
}
