//! A second, much simpler reader to compare with: words between blanks, correct for every file without glued cells.

/// The result of the simple reader.
pub(crate) struct Plain {
    pub gpus: usize,
    pub nics: Vec<String>,
    pub devices: Vec<String>,
    pub links: Vec<Vec<String>>,
    /// The values behind each GPU's links that are not `N/A`, in order.
    pub values: Vec<Vec<String>>,
}

pub(crate) fn read(text: &str) -> Plain {
    let clean = text.replace("\u{1b}[4m", "").replace("\u{1b}[0m", "");
    let mut lines = clean.lines().skip(1);
    let header = lines.next().unwrap().replace("GPU NUMA ID", "");
    let names: Vec<String> = header
        .split_whitespace()
        .filter(|word| !["CPU", "NUMA", "Affinity"].contains(word))
        .map(str::to_owned)
        .collect();
    let gpus = names.iter().filter(|name| name.starts_with("GPU")).count();
    let mut links = Vec::new();
    let mut values = Vec::new();
    for name in &names {
        let row: Vec<String> = lines.next().unwrap().split_whitespace().map(str::to_owned).collect();
        assert_eq!(&row[0], name);
        links.push(row[1..=names.len()].to_vec());
        if values.len() < gpus {
            let rest = row[names.len() + 1..].iter().filter(|value| *value != "N/A");
            values.push(rest.cloned().collect());
        }
    }
    let devices = lines
        .skip_while(|line| *line != "NIC Legend:")
        .filter_map(|line| line.split_once(": "))
        .map(|(_, device)| device.to_owned())
        .collect();
    Plain { gpus, nics: names[gpus..].to_vec(), devices, links, values }
}
